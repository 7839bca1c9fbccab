// Clocks, threads and reports: see measure.hpp.
#include "measure.hpp"

#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <latch>
#include <new>
#include <string>
#include <system_error>
#include <thread>

namespace native {

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double cpu_now() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const std::size_t half = values.size() / 2;
  return values.size() % 2 != 0 ? values[half] : 0.5 * (values[half - 1] + values[half]);
}

double run_threads(std::uint64_t threads, const std::function<void(std::uint64_t)>& work) {
  std::latch ready(static_cast<std::ptrdiff_t>(threads));
  std::latch go(1);
  std::exception_ptr failure;
  std::atomic_flag failed = ATOMIC_FLAG_INIT;
  std::vector<std::thread> all;
  std::uint64_t started = 0;
  try {
    for (; started < threads; ++started)
      all.emplace_back([&, started] {
        ready.count_down();
        go.wait();
        try {
          work(started);
        } catch (...) {
          if (!failed.test_and_set()) failure = std::current_exception();
        }
      });
  } catch (const std::system_error& error) {
    // Those that wait for the others cannot be called off.
    std::fprintf(stderr, "cannot start thread %llu of %llu: %s\n", static_cast<unsigned long long>(started + 1),
                 static_cast<unsigned long long>(threads), error.what());
    std::_Exit(exit_failed);
  }
  ready.wait();
  const double begin = now();
  go.count_down();
  for (std::thread& thread : all) thread.join();
  const double end = now();
  if (failure) std::rethrow_exception(failure);
  return end - begin;
}

Json report(const Flags& flags, std::uint64_t nbytes, const Repeats& repeats) {
  Json json;
  json.add("program", flags.program());
  json.add("version", NATIVE_BENCH_VERSION);
  json.add("flags", flags.json());
  json.add("bytes", nbytes);
  json.add("seconds", repeats.seconds);
  json.add("cpu_seconds", repeats.cpu_seconds);
  json.add("gib_s_median", static_cast<double>(nbytes) / gib / median(repeats.seconds));
  return json;
}

void print(const Json& json) {
  if (std::puts(json.text().c_str()) < 0 || std::fflush(stdout) != 0) throw_errno("cannot write the result to stdout");
}

int guarded(const char* program, const std::function<void()>& body) {
  int code = exit_failed;
  std::string message;
  try {
    body();
    return 0;
  } catch (const UsageError& error) {
    code = exit_usage;
    message = error.what();
  } catch (const Unavailable& error) {
    code = exit_unavailable;
    message = error.what();
  } catch (const std::bad_alloc&) {
    message = "out of memory";
  } catch (const std::exception& error) {
    message = error.what();
  }
  std::fprintf(stderr, "%s: %s\n", program, message.c_str());
  return code;
}

}  // namespace native
