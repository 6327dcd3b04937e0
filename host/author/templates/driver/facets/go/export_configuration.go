package export_nodedock_driver_configuration

import "nodedock-driver/driver"

var (
	ConfigSchema       = driver.ConfigSchema
	ParametersSchema   = driver.ParametersSchema
	ValidateConfig     = driver.ValidateConfig
	ValidateParameters = driver.ValidateParameters
)
