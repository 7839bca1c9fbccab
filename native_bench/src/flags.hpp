// The knobs of a program: `--name value` or `--name=value`, with --help and --version. Every knob has a default;
// what was used, defaults included, goes into the result.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "json.hpp"

namespace native {

class Flags {
 public:
  Flags(std::string program, std::string about) : program_(std::move(program)), about_(std::move(about)) {}

  // "8M", "8MiB", "4096": bytes, with binary units.
  void size(const char* name, std::uint64_t* value, std::uint64_t least, std::uint64_t most, const char* help);
  void count(const char* name, std::uint64_t* value, std::uint64_t least, std::uint64_t most, const char* help);
  void integer(const char* name, std::int64_t* value, std::int64_t least, std::int64_t most, const char* help);
  void choice(const char* name, std::string* value, std::vector<std::string> choices, const char* help);
  void text(const char* name, std::string* value, const char* metavar, const char* help);
  void on_off(const char* name, bool* value, const char* help);

  // Everything that is no flag, in order.
  void positional(const char* metavar, std::vector<std::string>* values, const char* help);

  // Prints and ends the program for --help and --version; UsageError.
  void parse(int argc, char** argv);

  // What is used.
  Json json() const;

  const std::string& program() const { return program_; }

 private:
  struct Flag {
    std::string name, metavar, help, initial;
    std::function<void(const std::string&)> set;
    std::function<void(Json&)> show;
  };

  void add(const char* name, std::string metavar, const char* help, std::string initial,
           std::function<void(const std::string&)> set, std::function<void(Json&)> show);
  const Flag* find(const std::string& name) const;
  std::string help() const;

  std::string program_, about_, metavar_, positional_help_;
  std::vector<Flag> flags_;
  std::vector<std::string>* positional_ = nullptr;
};

}  // namespace native
