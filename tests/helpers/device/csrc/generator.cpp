#include "generator.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/empty.h>
#include <c10/core/GeneratorImpl.h>

#include <cstring>

#include "graph.h"

namespace emulated {
namespace {

class GeneratorImpl : public c10::GeneratorImpl {
 public:
  GeneratorImpl() : c10::GeneratorImpl(the_device(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}

  void set_current_seed(uint64_t seed) override {
    state_ = {seed, 0};
  }
  uint64_t current_seed() const override {
    return state_.seed;
  }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return state_.seed;
  }
  void set_offset(uint64_t offset) override {
    state_.offset = offset;
  }
  uint64_t get_offset() const override {
    return state_.offset;
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto tensor = at::empty({sizeof(State)}, at::kByte);
    std::memcpy(tensor.mutable_data_ptr(), &state_, sizeof(State));
    return tensor.getIntrusivePtr();
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(
        state.numel() == sizeof(State) && state.device().is_cpu(), "expected a state of ", sizeof(State), " bytes");
    std::memcpy(&state_, state.data(), sizeof(State));
  }

  uint64_t draw() {
    std::lock_guard lock(mutex_);
    return state_.seed + 0x9E3779B97F4A7C15 * ++state_.offset;
  }

 private:
  struct State {
    uint64_t seed = c10::default_rng_seed_val;
    uint64_t offset = 0;
  };

  GeneratorImpl* clone_impl() const override {
    auto* clone = new GeneratorImpl;
    clone->state_ = state_;
    return clone;
  }

  State state_;
};

} // namespace

const at::Generator& default_generator() {
  static auto& generator = *new at::Generator(new_generator());
  return generator;
}

at::Generator new_generator() {
  return at::make_generator<GeneratorImpl>();
}

at::Generator next_cpu_generator(const std::optional<at::Generator>& generator) {
  auto& own = generator ? *generator : default_generator();
  auto* impl = dynamic_cast<GeneratorImpl*>(own.unsafeGetGeneratorImpl());
  TORCH_CHECK(impl != nullptr, "expected a generator of the device, got one of ", own.device());
  auto* graph = capturing();
  auto drawn = at::detail::createCPUGenerator(graph == nullptr ? impl->draw() : 0);
  if (graph != nullptr) {
    graph->add_draw([own, impl, drawn] {
      return [drawn, seed = impl->draw()]() mutable { drawn.set_current_seed(seed); };
    });
  }
  return drawn;
}

} // namespace emulated
