// libcurl, loaded when the first address is opened: a program starts without it, and a system that
// lacks it can do everything with files.
#pragma once

#include <curl/curl.h>

namespace ferry::distckpt {

// The functions of libcurl that are used, under their names without the prefix.
struct CurlLibrary {
  decltype(&curl_global_init) global_init = nullptr;
  decltype(&curl_easy_init) easy_init = nullptr;
  decltype(&curl_easy_reset) easy_reset = nullptr;
  decltype(&curl_easy_cleanup) easy_cleanup = nullptr;
  decltype(&curl_easy_setopt) easy_setopt = nullptr;
  decltype(&curl_easy_perform) easy_perform = nullptr;
  decltype(&curl_easy_strerror) easy_strerror = nullptr;
  decltype(&curl_easy_getinfo) easy_getinfo = nullptr;
  decltype(&curl_slist_append) slist_append = nullptr;
  decltype(&curl_slist_free_all) slist_free_all = nullptr;
  decltype(&curl_version) version = nullptr;
};

// Throws Error(kIo) if the system has no libcurl. It stays loaded.
const CurlLibrary& curl_library();

}  // namespace ferry::distckpt
