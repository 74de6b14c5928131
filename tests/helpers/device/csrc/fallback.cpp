// Every operation without a kernel of its own here: runs as its CPU kernel, on the current stream.
//
// The host needs the shapes of results before anything has run, and takes them from the operation on meta tensors. What
// has no such shapes, because they depend on values or because nobody has written the rule, is waited for.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/native_layer_norm_native.h>
#include <torch/library.h>

#include "generator.h"
#include "launch.h"

namespace emulated {
namespace {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;
using Conversion = std::function<Tensor(const Tensor&)>;

template <typename Element>
IValue convert_list(const IValue& value, const Conversion& convert) {
  c10::List<Element> result;
  for (const IValue& each : value.toListRef()) {
    if (each.isNone()) {
      result.push_back(Element());
    } else {
      auto tensor = each.toTensor();
      result.push_back(tensor.defined() ? convert(tensor) : tensor);
    }
  }
  return result;
}

// The value with its tensors converted.
IValue convert_tensors(const IValue& value, const Conversion& convert) {
  if (value.isTensor()) {
    auto& tensor = value.toTensor();
    return tensor.defined() ? convert(tensor) : tensor;
  }
  if (value.isTensorList()) {
    return convert_list<Tensor>(value, convert);
  }
  if (value.isList() && value.toList().elementType()->kind() == c10::TypeKind::OptionalType) {
    auto inner = value.toList().elementType()->expectRef<c10::OptionalType>().getElementType();
    if (inner->kind() == c10::TypeKind::TensorType) {
      return convert_list<std::optional<Tensor>>(value, convert);
    }
  }
  return value;
}

// Calls the CPU's kernel. torch 2.11 takes an operation with several outputs off the stack before it has put the results
// there, which are the outputs themselves: somebody else has to hold them meanwhile.
void call(const c10::OperatorHandle& operation, Stack& stack) {
  auto arguments = stack;
  operation.callBoxed(&stack);
}

void for_each_tensor(const IValue& value, const std::function<void(const Tensor&)>& visit) {
  convert_tensors(value, [&](const Tensor& tensor) {
    visit(tensor);
    return tensor;
  });
}

// A meta tensor of the same layout. Numbers from the host take part in type promotion as numbers.
Tensor meta_like(const Tensor& tensor) {
  auto options = tensor.options().device(c10::kMeta).requires_grad(false);
  auto elements = static_cast<int64_t>(tensor.storage().nbytes() / tensor.itemsize());
  auto result = at::empty({elements}, options);
  auto* impl = result.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  impl->set_storage_offset(tensor.storage_offset());
  return as_number_like(result, tensor);
}

// A tensor of the host, as it is now: by the time the task runs, it may be another.
Tensor snapshot(const Tensor& tensor) {
  return as_number_like(tensor.clone(), tensor);
}

Tensor new_like(const Tensor& layout) {
  return at::empty_strided(layout.sizes(), layout.strides(), layout.options().device(the_device()));
}

// The view of `base` that `layout` is of its meta tensor.
Tensor view_like(const Tensor& base, const Tensor& layout) {
  auto impl = c10::make_intrusive<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(base.storage()), base.key_set(), layout.dtype());
  impl->set_storage_offset(layout.storage_offset());
  impl->set_sizes_and_strides(layout.sizes(), layout.strides());
  return Tensor(std::move(impl));
}

bool holds_tensors(const c10::TypePtr& type) {
  return type->isSubtypeOf(*c10::TensorType::get()) || type->isSubtypeOf(*c10::ListType::ofTensors());
}

bool is_written(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

// One call of an operation.
class Call {
 public:
  Call(const c10::OperatorHandle& operation, const Stack& stack)
      : operation_(operation), schema_(operation.schema()), name_(c10::toString(schema_.operator_name())) {
    auto arguments = torch::jit::last(stack, schema_.arguments().size());
    arguments_.assign(arguments.begin(), arguments.end());
  }

  Stack run() {
    std::optional<Stack> shapes;
    if (can_infer()) {
      shapes = infer();
      if (!shapes && needs_shapes()) {
        return run_now();
      }
    } else {
      return run_now();
    }
    fit_outputs(shapes);
    return run_later(shapes);
  }

 private:
  const std::vector<c10::Argument>& returns() const {
    return schema_.returns();
  }

  // Whether the operation on meta tensors tells what the CPU's kernel returns: all results are tensors, and nothing of
  // the host's is written.
  bool can_infer() const {
    if (name_ == "aten::native_batch_norm") {
      return false; // in bf16, the rule gives the statistics the dtype that CUDA's kernel does
    }
    for (auto& each : returns()) {
      if (!holds_tensors(each.type())) {
        return false;
      }
    }
    bool writes_host = false;
    for (size_t i = 0; i < arguments_.size(); ++i) {
      if (is_written(schema_.arguments()[i])) {
        for_each_tensor(arguments_[i], [&](const Tensor& tensor) { writes_host |= !is_on_device(tensor); });
      }
    }
    return !writes_host;
  }

  // Whether some result is not one of the arguments.
  bool needs_shapes() const {
    return std::any_of(returns().begin(), returns().end(), [](auto& each) { return !is_written(each); });
  }

  bool has_outputs() const {
    auto& all = schema_.arguments();
    return std::any_of(all.begin(), all.end(), [](auto& each) { return each.is_out(); });
  }

  // What the operation returns for meta tensors. Nothing where that fails, or is not needed.
  std::optional<Stack> infer() {
    meta_.clear();
    if (!needs_shapes() && !has_outputs()) {
      return std::nullopt;
    }
    at::AutoDispatchBelowAutograd below;
    try {
      for (auto& each : arguments_) {
        meta_.push_back(
            each.isDevice() ? IValue(c10::Device(c10::kMeta))
                : each.isGenerator() ? IValue() : convert_tensors(each, meta_like));
      }
      Stack stack = meta_;
      operation_.callBoxed(&stack);
      return stack;
    } catch (const std::exception&) {
      meta_.clear();
      return std::nullopt;
    }
  }

  // Resizes the tensors that get the results, as the operation has resized their meta tensors.
  void fit_outputs(const std::optional<Stack>& shapes) {
    if (!shapes) {
      return;
    }
    for (size_t i = 0; i < arguments_.size(); ++i) {
      if (!schema_.arguments()[i].is_out()) {
        continue;
      }
      std::vector<Tensor> wanted;
      for_each_tensor(meta_[i], [&](const Tensor& tensor) { wanted.push_back(tensor); });
      size_t next = 0;
      for_each_tensor(arguments_[i], [&](const Tensor& tensor) {
        auto& layout = wanted.at(next++);
        if (tensor.sizes() != layout.sizes()) {
          tensor.resize_(layout.sizes());
          tensor.unsafeGetTensorImpl()->set_sizes_and_strides(layout.sizes(), layout.strides());
        }
      });
    }
  }

  // The arguments for the CPU's kernel.
  Stack prepare() {
    Stack stack;
    bool is_random = operation_.hasTag(at::Tag::nondeterministic_seeded);
    for (size_t i = 0; i < arguments_.size(); ++i) {
      auto& value = arguments_[i];
      auto type = schema_.arguments()[i].type();
      if (auto optional = type->cast<c10::OptionalType>()) {
        type = optional->getElementType();
      }
      bool writes = is_written(schema_.arguments()[i]);
      if (value.isDevice()) {
        stack.emplace_back(c10::Device(c10::kCPU));
      } else if (type->kind() == c10::TypeKind::GeneratorType && is_random) {
        is_random = false;
        stack.emplace_back(
            next_cpu_generator(value.isGenerator() ? std::optional(value.toGenerator()) : std::nullopt));
      } else {
        stack.push_back(convert_tensors(value, [&](const Tensor& tensor) {
          if (!is_on_device(tensor)) {
            return writes ? tensor : snapshot(tensor);
          }
          accesses_.push_back(access(tensor, writes));
          return host_alias(tensor);
        }));
      }
    }
    TORCH_CHECK(!is_random, name_, " draws random numbers, but takes no generator");
    return stack;
  }

  // The result that is, or is a view of, an argument; nothing for a new tensor.
  std::optional<IValue> aliased(const c10::Argument& result, const IValue& shape) const {
    auto* info = result.alias_info();
    if (info == nullptr) {
      return std::nullopt;
    }
    for (size_t i = 0; i < arguments_.size(); ++i) {
      auto* other = schema_.arguments()[i].alias_info();
      if (other == nullptr || other->beforeSets() != info->beforeSets()) {
        continue;
      }
      if (info->isWrite()) {
        return arguments_[i];
      }
      TORCH_CHECK(!shape.isNone(), name_, " makes a view whose shape is not known before it runs");
      return convert_tensors(shape, [&](const Tensor& each) { return view_like(arguments_[i].toTensor(), each); });
    }
    return std::nullopt;
  }

  Stack run_later(const std::optional<Stack>& shapes) {
    Stack results;
    bool has_work = returns().empty();
    std::vector<std::pair<size_t, std::vector<Tensor>>> fresh; // by position, in the device's memory
    for (size_t i = 0; i < returns().size(); ++i) {
      auto shape = shapes ? shapes->at(i) : IValue();
      if (auto known = aliased(returns()[i], shape)) {
        results.push_back(*known);
        has_work |= is_written(returns()[i]);
        continue;
      }
      has_work = true;
      fresh.emplace_back(i, std::vector<Tensor>());
      results.push_back(convert_tensors(shape, [&](const Tensor& layout) {
        fresh.back().second.push_back(new_like(layout));
        return fresh.back().second.back();
      }));
    }
    if (!has_work) {
      return results; // a view
    }
    auto stack = prepare();
    for (auto& [position, tensors] : fresh) {
      for (auto& tensor : tensors) {
        accesses_.push_back(access(tensor, true));
        tensor = host_alias(tensor);
      }
    }
    launch(name_, accesses_, [operation = operation_, arguments = stack, fresh]() mutable {
      auto stack = arguments; // a graph runs it again
      call(operation, stack);
      for (auto& [position, tensors] : fresh) {
        size_t next = 0;
        for_each_tensor(stack.at(position), [&](const Tensor& computed) {
          auto& target = tensors.at(next++);
          TORCH_CHECK(
              computed.sizes() == target.sizes() && computed.dtype() == target.dtype(),
              "computed ", computed.dtype(), computed.sizes(), ", expected ", target.dtype(), target.sizes());
          target.copy_(computed);
        });
      }
    });
    return results;
  }

  // Waits for what the operation computes, and takes the shapes of results from that.
  Stack run_now() {
    auto stack = std::make_shared<Stack>(prepare());
    launch_and_wait(name_, accesses_, [operation = operation_, stack] { call(operation, *stack); });
    Stack results;
    for (size_t i = 0; i < returns().size(); ++i) {
      if (auto known = aliased(returns()[i], IValue())) {
        results.push_back(*known);
      } else {
        results.push_back(convert_tensors(stack->at(i), [](const Tensor& computed) {
          auto result = new_like(computed);
          result.copy_(computed);
          return result;
        }));
      }
    }
    return results;
  }

  const c10::OperatorHandle operation_;
  const c10::FunctionSchema& schema_;
  const std::string name_;
  std::vector<IValue> arguments_;
  Stack meta_; // the arguments as meta tensors, after the operation
  std::vector<Access> accesses_;
};

void run(const c10::OperatorHandle& operation, Stack* stack) {
  auto results = Call(operation, *stack).run();
  torch::jit::drop(*stack, operation.schema().arguments().size());
  for (auto& each : results) {
    stack->push_back(std::move(each));
  }
}

const c10::OperatorHandle& find(const char* name) {
  return *new c10::OperatorHandle(c10::Dispatcher::singleton().findSchemaOrThrow(name, ""));
}

// What torch calls for devices that are not its own has no kernel on the CPU; these have.
void convolution(const c10::OperatorHandle&, Stack* stack) {
  static auto& operation = find("aten::convolution");
  run(operation, stack);
}

void convolution_backward(const c10::OperatorHandle& overrideable, Stack* stack) {
  static auto& operation = find("aten::convolution_backward");
  auto arguments = torch::jit::pop(*stack, overrideable.schema().arguments().size());
  auto weight = arguments.at(2).toTensor();
  bool is_transposed = arguments.at(6).toBool();
  int64_t channels = is_transposed ? weight.size(1) * arguments.at(8).toInt() : weight.size(0);
  bool has_bias = arguments.at(9).toBoolList().get(2);
  arguments.insert(arguments.begin() + 3, has_bias ? IValue(std::vector<int64_t>{channels}) : IValue());
  for (auto& each : arguments) {
    stack->push_back(std::move(each));
  }
  run(operation, stack);
}

// torch composes it of other operations, with other roundings than the CPU's kernel. In 16 bits that stays so: there the
// rule for shapes gives the statistics the dtype that CUDA's kernel does.
void layer_norm(const c10::OperatorHandle& operation, Stack* stack) {
  auto& input = torch::jit::peek(*stack, 0, operation.schema().arguments().size()).toTensor();
  if (input.scalar_type() == at::kFloat || input.scalar_type() == at::kDouble) {
    run(operation, stack);
    return;
  }
  auto arguments = torch::jit::pop(*stack, operation.schema().arguments().size());
  auto [output, mean, scale] = at::native::math_native_layer_norm(
      arguments.at(0).toTensor(),
      arguments.at(1).toIntVector(),
      arguments.at(2).toOptional<Tensor>(),
      arguments.at(3).toOptional<Tensor>(),
      arguments.at(4).toDouble());
  torch::jit::push(*stack, output, mean, scale);
}

} // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("native_layer_norm", torch::CppFunction::makeFromBoxedFunction<&layer_norm>());
  library.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  library.impl(
      "convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
}

} // namespace emulated
