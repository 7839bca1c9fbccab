// How do the programs fail? Each class below has an exit code of its own, so that a caller can tell a machine
// that lacks something from a measurement that went wrong.
#pragma once

#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>

namespace native {

constexpr int exit_failed = 1;
constexpr int exit_usage = 2;
constexpr int exit_unavailable = 3;

// The measurement failed or its result was wrong.
struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A flag is unknown, malformed or out of its range.
struct UsageError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// This machine, kernel, file system or build does not have what was asked for.
struct Unavailable : std::runtime_error {
  using std::runtime_error::runtime_error;
};

[[noreturn]] inline void throw_errno(const std::string& doing, int code = errno) {
  throw Failure(doing + ": " + std::strerror(code));
}

}  // namespace native
