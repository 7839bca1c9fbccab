// Wall-clock and CPU time of work done by several threads, and the report every program ends with.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <vector>

#include "errors.hpp"
#include "flags.hpp"
#include "json.hpp"

namespace native {

constexpr double gib = 1024.0 * 1024.0 * 1024.0;

// Seconds, from the steady clock.
double now();

// User and system time of all threads of the process so far.
double cpu_now();

double median(std::vector<double> values);

// Runs work(0) … work(threads - 1) at the same time; returns the seconds from the moment all threads are there to
// the end of the last. The first exception is thrown again, once all have ended.
double run_threads(std::uint64_t threads, const std::function<void(std::uint64_t)>& work);

// What is next? Hands out 0 … count - 1, each once, to whichever thread asks; nothing more after stop().
class Queue {
 public:
  explicit Queue(std::uint64_t count) : count_(count) {}

  bool take(std::uint64_t* index) {
    *index = next_.fetch_add(1, std::memory_order_relaxed);
    return *index < count_;
  }

  // When one thread has failed, the others need not finish first.
  void stop() { next_.store(count_, std::memory_order_relaxed); }

 private:
  std::uint64_t count_;
  std::atomic<std::uint64_t> next_{0};
};

// The repeats of one measurement. Preparation and checks between the repeats are not timed.
struct Repeats {
  std::vector<double> seconds, cpu_seconds;

  template <typename Timed>
  void time(Timed&& timed) {
    const double cpu = cpu_now();
    seconds.push_back(timed());
    cpu_seconds.push_back(cpu_now() - cpu);
  }
};

// The fields every result begins with.
Json report(const Flags& flags, std::uint64_t nbytes, const Repeats& repeats);

void print(const Json& json);

// Runs a program's body and turns what it throws into a message on stderr and an exit code.
int guarded(const char* program, const std::function<void()>& body);

}  // namespace native
