#include "trainer/optimizer/first_place.h"

#include "models/distributed/messages.h"

namespace ferry::trainer {

void keep_first(std::string& first, const std::string& place) {
  if (!place.empty() && (first.empty() || place < first)) first = place;
}

std::string first_name(const models::ProcessGroup& all, std::string mine) {
  for (const auto& place : models::gather(all, mine)) keep_first(mine, place);
  return mine.substr(mine.rfind('/') + 1);
}

}  // namespace ferry::trainer
