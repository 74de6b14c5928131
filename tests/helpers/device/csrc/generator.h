// Random numbers of the device: a seed, and how many operations have drawn from it.
#pragma once

#include <ATen/core/Generator.h>

namespace emulated {

const at::Generator& default_generator();
at::Generator new_generator();

// What one operation draws from when it runs, whenever that is: the generator moves on at once, on the host.
at::Generator next_cpu_generator(const std::optional<at::Generator>& generator);

} // namespace emulated
