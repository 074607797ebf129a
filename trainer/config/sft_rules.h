// The rules of a run of supervised fine-tuning.
#pragma once

#include "trainer/config/config_rules.h"
#include "trainer/config/sft_config.h"

namespace ferry::trainer {

const ConfigRules<SftConfig>& sft_rules();

}  // namespace ferry::trainer
