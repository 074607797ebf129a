#include "serve/api/api_error.h"

#include <utility>

namespace ferry::serve {
namespace {

const char* type_of(int status) {
  switch (status) {
    case 401:
      return "authentication_error";
    case 403:
      return "permission_error";
    case 404:
      return "not_found_error";
    case 429:
      return "rate_limit_error";
    default:
      return status < 500 ? "invalid_request_error" : "server_error";
  }
}

// what() would end at a NUL, which a client may have written.
std::string without_nuls(std::string message) {
  for (std::size_t at = 0; (at = message.find('\0', at)) != std::string::npos;)
    message.replace(at, 1, "\\0");
  return message;
}

}  // namespace

ApiError::ApiError(int status, const std::string& message, std::string param, std::string code)
    : std::runtime_error(without_nuls(message)),
      status_(status),
      param_(std::move(param)),
      code_(std::move(code)) {}

std::string ApiError::body() const {
  const auto or_null = [](const std::string& text) {
    return text.empty() ? ordered_json() : ordered_json(text);
  };
  return dump({{"error",
                {{"message", what()},
                 {"type", type_of(status_)},
                 {"param", or_null(param_)},
                 {"code", or_null(code_)}}}});
}

ApiError api_error(const Error& error) {
  const bool of_client = error.kind() == ErrorKind::kUsage || error.kind() == ErrorKind::kNotFound;
  return {of_client ? 400 : 500, error.what()};
}

std::string dump(const ordered_json& value) {
  return value.dump(-1, ' ', false, ordered_json::error_handler_t::replace);
}

}  // namespace ferry::serve
