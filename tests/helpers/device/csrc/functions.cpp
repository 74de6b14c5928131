#include "functions.h"

#include "launch.h"

namespace emulated {
namespace {

namespace py = pybind11;

struct Call {
  py::function function;
  py::tuple arguments;
};

// The thread that lets go of it last may not have Python's lock.
std::shared_ptr<Call> make_call(const py::function& function, const py::list& arguments) {
  return {new Call{function, py::tuple(arguments)}, [](Call* call) {
            py::gil_scoped_acquire lock;
            delete call;
          }};
}

} // namespace

void launch_function(
    const std::string& operation,
    const py::function& function,
    const py::list& arguments,
    const std::vector<bool>& is_written) {
  std::vector<Access> accesses;
  py::list on_host;
  for (size_t i = 0; i < arguments.size(); ++i) {
    py::object argument = arguments[i];
    if (THPVariable_Check(argument.ptr())) {
      const auto& tensor = THPVariable_Unpack(argument.ptr());
      if (is_on_device(tensor)) {
        accesses.push_back(access(tensor, is_written.at(i)));
        argument = py::cast(host_alias(tensor));
      } else {
        argument = py::cast(tensor.clone()); // by the time the task runs, it may have changed
      }
    }
    on_host.append(argument);
  }
  auto call = make_call(function, on_host);
  py::gil_scoped_release unlocked;
  launch(operation, accesses, [call] {
    py::gil_scoped_acquire lock;
    call->function(*call->arguments);
  });
}

} // namespace emulated
