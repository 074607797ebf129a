#include "distckpt/storage/network/curl_library.h"

#include <dlfcn.h>

#include <array>
#include <string>

#include "distckpt/base/error.h"
#include "distckpt/base/printable.h"

namespace ferry::distckpt {
namespace {

template <typename Function>
void find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(::dlsym(library, name));
  require(function != nullptr, ErrorKind::kIo, "libcurl: lacks {}", name);
}

CurlLibrary load() {
  void* library = nullptr;
  std::string reason;  // of the first: without it, or with another that it needs missing
  for (const auto* name : std::array{"libcurl.so.4", "libcurl-gnutls.so.4"}) {
    if (library != nullptr) break;
    library = ::dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr && reason.empty()) reason = ::dlerror();
  }
  if (library == nullptr) {
    throw Error(
        ErrorKind::kIo,
        fmt::format("libcurl, which reads all addresses, cannot be loaded: {}", printable(reason)),
        "install it (Debian: apt-get install libcurl4)");
  }
  CurlLibrary curl;
  find(library, "curl_global_init", curl.global_init);
  find(library, "curl_easy_init", curl.easy_init);
  find(library, "curl_easy_reset", curl.easy_reset);
  find(library, "curl_easy_cleanup", curl.easy_cleanup);
  find(library, "curl_easy_setopt", curl.easy_setopt);
  find(library, "curl_easy_perform", curl.easy_perform);
  find(library, "curl_easy_strerror", curl.easy_strerror);
  find(library, "curl_easy_getinfo", curl.easy_getinfo);
  find(library, "curl_slist_append", curl.slist_append);
  find(library, "curl_slist_free_all", curl.slist_free_all);
  find(library, "curl_version", curl.version);
  require(curl.global_init(CURL_GLOBAL_DEFAULT) == CURLE_OK, ErrorKind::kIo,
          "libcurl: cannot be initialised");
  return curl;
}

}  // namespace

const CurlLibrary& curl_library() {
  static const CurlLibrary library = load();
  return library;
}

}  // namespace ferry::distckpt
