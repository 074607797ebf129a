// The certificate of verify --numerics, for people and for programs.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "models/certificate/numerics_certificate.h"

namespace ferry::cli {

std::string numerics_text(const models::NumericsCertificate& certificate);
nlohmann::ordered_json numerics_json(const models::NumericsCertificate& certificate);

}  // namespace ferry::cli
