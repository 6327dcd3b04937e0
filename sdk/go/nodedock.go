// Package nodedock has helpers for drivers: the host as an interface, reads below /sys that tell an absence from a failure, problems as
// errors, devices, and container edits.
//
// They are thin: everything they take and return is of the bindings, the packages below bindings.
package nodedock

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/nodedock/nodedock/sdk/go/bindings/nodedock_driver_claims"
	"github.com/nodedock/nodedock/sdk/go/bindings/nodedock_driver_common"
	"github.com/nodedock/nodedock/sdk/go/bindings/nodedock_driver_container_edits"
	"github.com/nodedock/nodedock/sdk/go/bindings/nodedock_driver_inventory"
	types "go.bytecodealliance.org/pkg/wit/types"
)

// Problem is a problem of the contract as an error.
type Problem struct {
	nodedock_driver_common.Problem
}

func (p *Problem) Error() string { return p.Code + ": " + p.Message }

// Invalid returns a refusal: the host does not retry until the claim or the config changes.
func Invalid(code, format string, args ...any) error {
	return newProblem(nodedock_driver_common.ProblemKindInvalid, code, format, args)
}

// NotFound returns the problem that something named in the request does not exist.
func NotFound(code, format string, args ...any) error {
	return newProblem(nodedock_driver_common.ProblemKindNotFound, code, format, args)
}

// Unavailable returns the problem that something is not possible now. The host retries.
func Unavailable(code, format string, args ...any) error {
	return newProblem(nodedock_driver_common.ProblemKindUnavailable, code, format, args)
}

func newProblem(kind nodedock_driver_common.ProblemKind, code, format string, args []any) error {
	return &Problem{nodedock_driver_common.Problem{Kind: kind, Code: code, Message: fmt.Sprintf(format, args...)}}
}

// IsAbsent returns whether an error of a read is a fact about the node: nothing exists there, or the kernel has no value now.
func IsAbsent(err error) bool {
	var problem *Problem
	return errors.As(err, &problem) && (problem.Kind == nodedock_driver_common.ProblemKindNotFound || problem.Code == "no-value")
}

// ProblemOf returns the problem of an error: its own, or a defect of the driver.
func ProblemOf(err error) nodedock_driver_common.Problem {
	var problem *Problem
	if errors.As(err, &problem) {
		return problem.Problem
	}
	return nodedock_driver_common.Problem{
		Kind: nodedock_driver_common.ProblemKindInternal, Code: "driver-error", Message: err.Error(),
	}
}

// Result returns the result of an exported function.
func Result[T any](value T, err error) types.Result[T, nodedock_driver_common.Problem] {
	if err != nil {
		return types.Err[T](ProblemOf(err))
	}
	return types.Ok[T, nodedock_driver_common.Problem](value)
}

// Done returns the result of an exported function that returns nothing.
func Done(err error) types.Result[types.Unit, nodedock_driver_common.Problem] {
	return Result(types.Unit{}, err)
}

// Find returns the content of a file below /sys, and false if it does not exist or has no value now. Every other problem is an error: a
// read that failed says nothing about the node.
func Find(host Host, path string) (string, bool, error) {
	return present(host.Read(path))
}

// FindLink returns the target of a link below /sys, relative to /sys, and false if there is no link.
func FindLink(host Host, path string) (string, bool, error) {
	target, err := host.ReadLink(path)
	var problem *Problem
	// Recorded machines have such links, kernels do not.
	if errors.As(err, &problem) && (problem.Code == "not-a-link" || problem.Code == "outside-sysfs") {
		return "", false, nil
	}
	return present(target, err)
}

// FindParsed returns the content of a file as Find does, parsed, such as by ParseInt; false also for content that does not parse.
func FindParsed[T any](host Host, path string, parse func(string) (T, error)) (T, bool, error) {
	var none T
	text, found, err := Find(host, path)
	if err != nil || !found {
		return none, false, err
	}
	value, err := parse(strings.TrimSpace(text))
	if err != nil {
		return none, false, nil
	}
	return value, true, nil
}

// ParseInt parses a decimal integer.
func ParseInt(text string) (int64, error) { return strconv.ParseInt(text, 10, 64) }

// ParseHex parses `0x10de` and `10de`.
func ParseHex(text string) (uint64, error) {
	return strconv.ParseUint(strings.TrimPrefix(text, "0x"), 16, 64)
}

// Devices returns the directories of devices that match a glob below /sys, such as `class/net/*`: links are followed, each once, sorted.
func Devices(host Host, pattern string) ([]string, error) {
	paths, err := host.Glob(pattern)
	if err != nil {
		return nil, err
	}
	for i, path := range paths {
		target, found, err := FindLink(host, path)
		if err != nil {
			return nil, err
		}
		if found {
			paths[i] = target
		}
	}
	slices.Sort(paths)
	return slices.Compact(paths), nil
}

func present(text string, err error) (string, bool, error) {
	if IsAbsent(err) {
		return "", false, nil
	}
	return text, err == nil, err
}

// Int returns an attribute.
func Int(name string, value int64) nodedock_driver_inventory.Attribute {
	return nodedock_driver_inventory.Attribute{Name: name, Value: nodedock_driver_inventory.MakeAttributeValueInt(value)}
}

// Text returns an attribute.
func Text(name, value string) nodedock_driver_inventory.Attribute {
	return nodedock_driver_inventory.Attribute{Name: name, Value: nodedock_driver_inventory.MakeAttributeValueText(value)}
}

// Bool returns an attribute.
func Bool(name string, value bool) nodedock_driver_inventory.Attribute {
	return nodedock_driver_inventory.Attribute{Name: name, Value: nodedock_driver_inventory.MakeAttributeValueBoolean(value)}
}

// Node returns a device node for a container, at the same path, to read and to write.
func Node(path string) nodedock_driver_container_edits.DeviceNode {
	access := nodedock_driver_container_edits.NodeAccessRead | nodedock_driver_container_edits.NodeAccessWrite
	return nodedock_driver_container_edits.DeviceNode{Path: path, Access: access}
}

// Env returns an environment variable for a container.
func Env(name, value string) nodedock_driver_common.KeyValue {
	return nodedock_driver_common.KeyValue{Key: name, Value: value}
}

// Mount returns a mount for a container, at the same path, read-only.
func Mount(path string) nodedock_driver_container_edits.Mount {
	return nodedock_driver_container_edits.Mount{
		HostPath: path, ContainerPath: path, Options: []string{"ro", "nosuid", "nodev", "bind"},
	}
}

// Prepared returns a prepared device for one of a claim.
func Prepared(allocated nodedock_driver_claims.AllocatedDevice, edits nodedock_driver_container_edits.ContainerEdits) nodedock_driver_claims.PreparedDevice {
	// Without the subrequest of a prioritised list.
	request, _, _ := strings.Cut(allocated.Request, "/")
	return nodedock_driver_claims.PreparedDevice{
		Requests: []string{request},
		Pool:     allocated.Pool,
		Device:   allocated.Device,
		ShareId:  allocated.ShareId,
		Edits:    edits,
	}
}

// PrepareEach prepares every device of a claim.
func PrepareEach(claim nodedock_driver_claims.Claim, prepare func(nodedock_driver_claims.AllocatedDevice) (nodedock_driver_container_edits.ContainerEdits, error)) (nodedock_driver_claims.PreparedClaim, error) {
	var prepared nodedock_driver_claims.PreparedClaim
	for _, allocated := range claim.Devices {
		edits, err := prepare(allocated)
		if err != nil {
			return nodedock_driver_claims.PreparedClaim{}, err
		}
		prepared.Devices = append(prepared.Devices, Prepared(allocated, edits))
	}
	return prepared, nil
}

// PrepareOutcomes returns the outcome of each claim.
func PrepareOutcomes(claims []nodedock_driver_claims.Claim, prepare func(nodedock_driver_claims.Claim) (nodedock_driver_claims.PreparedClaim, error)) []nodedock_driver_claims.PrepareOutcome {
	var outcomes []nodedock_driver_claims.PrepareOutcome
	for _, claim := range claims {
		outcomes = append(outcomes, nodedock_driver_claims.PrepareOutcome{Uid: claim.Id.Uid, Outcome: Result(prepare(claim))})
	}
	return outcomes
}

// UnprepareOutcomes returns the outcome of each claim.
func UnprepareOutcomes(records []nodedock_driver_claims.ClaimRecord, unprepare func(nodedock_driver_claims.ClaimRecord) error) []nodedock_driver_claims.UnprepareOutcome {
	var outcomes []nodedock_driver_claims.UnprepareOutcome
	for _, record := range records {
		outcomes = append(outcomes, nodedock_driver_claims.UnprepareOutcome{Uid: record.Claim.Id.Uid, Outcome: Done(unprepare(record))})
	}
	return outcomes
}
