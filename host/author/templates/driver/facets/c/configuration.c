// The operator's config and the parameters of claims: schemas, and checks of what a schema cannot express.

#include "nodes.h"

bool exports_nodedock_driver_configuration_config_schema(driver_string_t *schema) {
  *schema = owned("{\"type\": \"object\", \"properties\": {}, \"additionalProperties\": false}");
  return true;
}

// There is no schema: the driver has no parameters.
bool exports_nodedock_driver_configuration_parameters_schema(driver_string_t *schema) {
  (void)schema;
  return false;
}

bool exports_nodedock_driver_configuration_validate_config(driver_string_t *config,
                                                           exports_nodedock_driver_configuration_problem_t *problem) {
  (void)config, (void)problem;
  return true;
}

bool exports_nodedock_driver_configuration_validate_parameters(driver_string_t *parameters,
                                                               exports_nodedock_driver_configuration_problem_t *problem) {
  (void)parameters;
  *problem = (exports_nodedock_driver_configuration_problem_t){
      .kind = NODEDOCK_DRIVER_COMMON_PROBLEM_KIND_INVALID,
      .code = owned("bad-parameters"),
      .message = owned("this driver has no parameters"),
  };
  return false;
}
