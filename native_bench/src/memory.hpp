// Memory whose pages are known: 4 KiB or huge, present or fresh.
#pragma once

#include <sys/mman.h>

#include <cstdint>
#include <string>
#include <utility>

namespace native {

constexpr std::uint64_t page_size = 4096;
constexpr std::uint64_t huge_page_size = 2 << 20;

constexpr std::uint64_t round_up(std::uint64_t value, std::uint64_t unit) { return (value + unit - 1) / unit * unit; }

enum class Pages { small, huge };

inline Pages parse_pages(const std::string& text) { return text == "huge" ? Pages::huge : Pages::small; }

// Private anonymous memory, aligned to 2 MiB. It has no pages yet: `populate` gives it some.
class Memory {
 public:
  Memory() = default;

  // Unavailable if the machine has less.
  Memory(std::uint64_t nbytes, Pages pages);

  Memory(Memory&& other) noexcept { swap(other); }
  Memory& operator=(Memory&& other) noexcept {
    swap(other);
    return *this;
  }
  ~Memory() {
    if (base_ != nullptr) ::munmap(base_, mapped_);
  }

  char* data() const { return data_; }
  std::uint64_t size() const { return nbytes_; }

  // Gives a range its pages, and with that the memory its present contents, zeros.
  static void populate(char* data, std::uint64_t nbytes);

  // How much of it lies in huge pages, from smaps.
  std::uint64_t huge_bytes() const;

 private:
  void swap(Memory& other) {
    std::swap(base_, other.base_);
    std::swap(mapped_, other.mapped_);
    std::swap(data_, other.data_);
    std::swap(nbytes_, other.nbytes_);
  }

  void* base_ = nullptr;
  std::uint64_t mapped_ = 0;
  char* data_ = nullptr;
  std::uint64_t nbytes_ = 0;
};

}  // namespace native
