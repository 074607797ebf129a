// An error as OpenAI's API reports it: {"error": {"message", "type", "param", "code"}}.
#pragma once

#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>

#include "distckpt/base/error.h"

namespace ferry::serve {

using nlohmann::ordered_json;

class ApiError : public std::runtime_error {
 public:
  // `param`: the field of the request that is wrong; `code`: a word for programs. Both may be
  // empty.
  ApiError(int status, const std::string& message, std::string param = "", std::string code = "");

  int status() const { return status_; }
  std::string body() const;

 private:
  int status_;
  std::string param_;
  std::string code_;
};

// The error of an engine: a request that it refuses is the client's, all else the server's.
ApiError api_error(const Error& error);

// Text, with U+FFFD for bytes that are not UTF-8.
std::string dump(const ordered_json& value);

}  // namespace ferry::serve
