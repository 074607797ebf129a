// The advice in an answer that is no success: when to ask again, and what to mend.
#pragma once

#include <optional>
#include <string>

#include "distckpt/storage/network/http.h"

namespace ferry::distckpt {

// Seconds until the server wants to be asked again: of Retry-After, a number or a date (RFC 9110),
// or of RateLimit, as the Hugging Face hub sends it: "api";r=0;t=55
// (draft-ietf-httpapi-ratelimit-headers-09). A date counts from the answer's own.
std::optional<double> asked_pause(const HttpResponse& response);

// A hint of an Error: what S3's codes mean for whoever runs the command. Empty: there is none.
std::string advice(const HttpResponse& response);

}  // namespace ferry::distckpt
