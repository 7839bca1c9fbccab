// Blocks of files, moved by several threads: each with one blocking call at a time, or with a ring of its own and
// `depth` calls in flight.
#pragma once

#include <algorithm>
#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#ifdef NATIVE_BENCH_HAS_LIBURING
#include <liburing.h>
#endif

#include "errors.hpp"
#include "file.hpp"
#include "measure.hpp"
#include "memory.hpp"

namespace native {

struct Block {
  std::uint64_t file;    // index of the file
  std::uint64_t offset;  // in the file, and
  std::uint64_t place;   // in memory
  std::uint64_t nbytes;  // that the file has here
};

// Where each file begins in memory, each on a boundary of its own so that direct I/O goes there, and the blocks in
// the order of the files.
struct Plan {
  std::vector<std::uint64_t> places;
  std::vector<Block> blocks;
  std::uint64_t nbytes = 0;         // of the files
  std::uint64_t memory_nbytes = 0;  // with the gaps between them

  Plan(const std::vector<std::uint64_t>& sizes, std::uint64_t block) {
    for (std::uint64_t file = 0; file < sizes.size(); ++file) {
      places.push_back(memory_nbytes);
      for (std::uint64_t at = 0; at < sizes[file]; at += block)
        blocks.push_back({file, at, memory_nbytes + at, std::min(block, sizes[file] - at)});
      nbytes += sizes[file];
      memory_nbytes += round_up(sizes[file], page_size);
    }
  }
};

struct Knobs {
  std::string engine = "threads";
  std::uint64_t block = 8 << 20, threads = 2, depth = 1;

  void flags(Flags& flags) {
    flags.choice("engine", &engine, {"threads", "io_uring"},
                 "a blocking call at a time in each thread, or a ring in each thread");
    flags.size("block", &block, page_size, 1 << 30, "bytes per call, a multiple of 4096");
    flags.count("threads", &threads, 1, 1024, "threads");
    flags.count("depth", &depth, 1, 4096, "calls in flight per thread; more than one takes io_uring");
  }

  void check() const {
    if (block % page_size != 0) throw UsageError("--block: " + std::to_string(block) + " is no multiple of 4096");
    if (engine == "threads" && depth != 1)
      throw UsageError("--depth: a thread has one blocking call in flight; use more --threads, or --engine io_uring");
#ifndef NATIVE_BENCH_HAS_LIBURING
    if (engine == "io_uring")
      throw Unavailable("built without liburing; on Debian: apt-get install liburing-dev, then build again");
#endif
  }
};

#ifdef NATIVE_BENCH_HAS_LIBURING
class Ring {
 public:
  explicit Ring(unsigned depth) {
    const int code = -::io_uring_queue_init(depth, &ring_, 0);
    if (code == EPERM || code == ENOSYS)
      throw Unavailable(std::string("io_uring: ") + std::strerror(code) +
                        "; the kernel, its sysctl kernel.io_uring_disabled or a container's seccomp filter forbids it");
    if (code != 0) throw_errno("io_uring_queue_init with depth " + std::to_string(depth), code);
  }
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;
  ~Ring() { ::io_uring_queue_exit(&ring_); }
  io_uring* get() { return &ring_; }

 private:
  io_uring ring_{};
};
#endif

// Moves all blocks of a plan. `Mover` says where to and what then:
//   int fd(const Block&)
//   const std::string& path(const Block&)
//   char* memory(thread, slot, const Block&)      slot: which of the thread's calls in flight
//   std::uint64_t length(const Block&)            of the call; may reach beyond the file's end where it reads
//   void done(thread, slot, const Block&)         after the call, before the slot is used again
// `writes` of it says in which direction.
template <typename Mover>
class Transfer {
 public:
  Transfer(const Knobs& knobs, const Plan& plan, Mover& mover) : knobs_(knobs), plan_(plan), mover_(mover) {
#ifdef NATIVE_BENCH_HAS_LIBURING
    if (knobs.engine == "io_uring")
      for (std::uint64_t t = 0; t < knobs.threads; ++t)
        rings_.push_back(std::make_unique<Ring>(static_cast<unsigned>(knobs.depth)));
#endif
  }

  // Returns the seconds it took.
  double run() {
    Queue queue(plan_.blocks.size());
    return run_threads(knobs_.threads, [&](std::uint64_t thread) {
      try {
        if (knobs_.engine == "threads")
          calls(thread, queue);
        else
          ring(thread, queue);
      } catch (...) {
        queue.stop();
        throw;
      }
    });
  }

 private:
  static constexpr const char* what = Mover::writes ? "write" : "read";

  void calls(std::uint64_t thread, Queue& queue) {
    for (std::uint64_t index; queue.take(&index);) {
      const Block& block = plan_.blocks[index];
      char* memory = mover_.memory(thread, 0, block);
      const std::uint64_t length = mover_.length(block);
      const std::int64_t done = Mover::writes ? write_at(mover_.fd(block), memory, length, block.offset)
                                              : read_at(mover_.fd(block), memory, length, block.offset);
      check_transfer(mover_.path(block), what, block.offset, done, block.nbytes);
      mover_.done(thread, 0, block);
    }
  }

#ifdef NATIVE_BENCH_HAS_LIBURING
  void ring(std::uint64_t thread, Queue& queue) {
    io_uring* ring = rings_[thread]->get();
    std::vector<const Block*> slots(knobs_.depth, nullptr);
    std::vector<std::uint64_t> idle;
    for (std::uint64_t slot = knobs_.depth; slot-- > 0;) idle.push_back(slot);
    std::uint64_t in_flight = 0;
    std::exception_ptr failure;
    bool more = true;
    while (true) {
      while (more && !failure && !idle.empty()) {
        std::uint64_t index = 0;
        more = queue.take(&index);
        if (!more) break;
        const Block& block = plan_.blocks[index];
        const std::uint64_t slot = idle.back();
        idle.pop_back();
        slots[slot] = &block;
        io_uring_sqe* entry = ::io_uring_get_sqe(ring);
        char* memory = mover_.memory(thread, slot, block);
        const auto length = static_cast<unsigned>(mover_.length(block));
        if constexpr (Mover::writes)
          ::io_uring_prep_write(entry, mover_.fd(block), memory, length, block.offset);
        else
          ::io_uring_prep_read(entry, mover_.fd(block), memory, length, block.offset);
        ::io_uring_sqe_set_data(entry, reinterpret_cast<void*>(slot));
        ++in_flight;
      }
      if (in_flight == 0) break;
      const int code = -::io_uring_submit_and_wait(ring, 1);
      if (code == EINTR || code == EAGAIN) continue;
      if (code > 0) throw_errno("io_uring_submit_and_wait", code);
      io_uring_cqe* completion = nullptr;
      while (::io_uring_peek_cqe(ring, &completion) == 0) {
        const auto slot = reinterpret_cast<std::uint64_t>(::io_uring_cqe_get_data(completion));
        const std::int64_t done = completion->res;
        ::io_uring_cqe_seen(ring, completion);
        --in_flight;
        const Block& block = *slots[slot];
        // After a failure the calls in flight are still waited for: the kernel has their memory.
        try {
          check_transfer(mover_.path(block), what, block.offset, done, block.nbytes);
          mover_.done(thread, slot, block);
        } catch (...) {
          if (!failure) failure = std::current_exception();
          queue.stop();
        }
        idle.push_back(slot);
      }
    }
    if (failure) std::rethrow_exception(failure);
  }

  std::vector<std::unique_ptr<Ring>> rings_;
#else
  void ring(std::uint64_t, Queue&) {}
#endif

  const Knobs& knobs_;
  const Plan& plan_;
  Mover& mover_;
};

}  // namespace native
