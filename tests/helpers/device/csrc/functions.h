// Functions of Python's as tasks of a stream: compiled kernels, which Python calls.
#pragma once

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

namespace emulated {

// Enqueues a function on the current stream. It runs under Python's lock.
// Args:
//   operation: its name in errors.
//   function: gets, for each tensor of the device, an alias on the CPU; other arguments as they are.
//   is_written: by argument, whether the function writes it.
void launch_function(
    const std::string& operation,
    const pybind11::function& function,
    const pybind11::list& arguments,
    const std::vector<bool>& is_written);

} // namespace emulated
