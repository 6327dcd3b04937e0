package export_nodedock_driver_preparation

import (
	nodedock "github.com/nodedock/nodedock/sdk/go"
	. "github.com/nodedock/nodedock/sdk/go/bindings/nodedock_driver_claims"
	"github.com/nodedock/nodedock/sdk/go/bindings/nodedock_driver_common"
	"nodedock-driver/driver"
)

func Prepare(ctx nodedock_driver_common.Context, claims []Claim) []PrepareOutcome {
	return nodedock.PrepareOutcomes(claims, func(claim Claim) (PreparedClaim, error) {
		return driver.Prepare(nodedock.Imports(), ctx, claim)
	})
}

func Unprepare(ctx nodedock_driver_common.Context, records []ClaimRecord) []UnprepareOutcome {
	return nodedock.UnprepareOutcomes(records, func(record ClaimRecord) error {
		return driver.Unprepare(nodedock.Imports(), ctx, record)
	})
}
