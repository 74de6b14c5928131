// CUDA's device guard, hooks and choice of attention, without a driver. Autograd then sees one device and one stream.

#include <cstring>

#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

// The kernel of scaled_dot_product_attention, a value of at::SDPBackend.
extern "C" int64_t attention;
int64_t attention = 1;

namespace {

constexpr auto CUDA = c10::DeviceType::CUDA;

struct Guard final : c10::impl::NoOpDeviceGuardImpl<CUDA> {
  c10::Device exchangeDevice(c10::Device) const override { return {CUDA, 0}; }
  c10::Device getDevice() const override { return {CUDA, 0}; }
  c10::Stream getStream(c10::Device) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, {CUDA, 0}); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return getStream({CUDA, 0}); }
};

struct Hooks final : at::CUDAHooksInterface {
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  long versionCuDNN() const override { return 91900; }
  long versionRuntimeCuDNN() const override { return 91900; }
};

// torch's own choice asks the driver.
template <class... Args>
int64_t choose_attention(Args...) {
  return attention;
}

const Guard guard;
const Hooks hooks;

struct Registration {
  Registration() {
    c10::impl::registerDeviceGuard(CUDA, &guard);
    at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&choose_attention);
    // torch has created its hooks at import. A copy of the pointer to the virtual functions replaces them.
    std::memcpy((void*)&at::detail::getCUDAHooks(), (const void*)&hooks, sizeof(void*));
  }
} registration;

}  // namespace
