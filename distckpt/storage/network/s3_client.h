// Requests to S3 and to what speaks its language, with the keys, the region and the endpoint of
// aws_settings.h: signed if there are keys. Another endpoint has buckets in the path.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>

#include "distckpt/storage/network/http.h"

namespace ferry::distckpt {

// "s3://bucket/key".
struct S3Place {
  std::string bucket{};
  std::string key{};  // may be empty
  std::string address() const { return "s3://" + bucket + (key.empty() ? "" : "/" + key); }
};
S3Place parse_s3_address(std::string_view address);  // throws Error(kUsage)

// Parameters of a request's query: the signature wants them sorted.
using S3Query = std::map<std::string, std::string>;

HttpRequest s3_request(std::string method, const S3Place& place, const S3Query& query = {});

// Sends it as http_send() does. Throws Error(kNotFound | kIo) for any answer but a good one.
HttpResponse s3_send(const HttpRequest& request, const S3Place& place);
void s3_require_ok(const HttpResponse& response, const HttpRequest& request, const S3Place& place);

// The texts of all elements <name>...</name> in order, entities decoded. Elements of that name do
// not nest.
void for_each_element(std::string_view xml,
                      std::string_view name,
                      const std::function<void(std::string_view text)>& visit);
std::optional<std::string> element_text(std::string_view xml, std::string_view name);

// Each object whose key begins with `prefix`.
void s3_list(const S3Place& bucket,
             const std::string& prefix,
             const std::function<void(std::string key, std::int64_t size)>& visit);

}  // namespace ferry::distckpt
