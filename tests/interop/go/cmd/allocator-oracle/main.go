// Command allocator-oracle allocates devices as the Kubernetes scheduler does.
//
// It reads one history per line on standard input, and answers each with one line. A history has the slices and classes of a node, and
// cases. A case has the allocations of earlier claims, the devices that are held beside them, a claim, and the allocation that another
// allocator chose for it, or null. There is an answer for each case. It has the official allocation, or the error, and whether the official
// allocator makes the other choice if it may only use the devices of that choice for each request.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/dynamic-resource-allocation/structured"
	"k8s.io/utils/ptr"
)

// lineMax bounds the text of one history.
const lineMax = 64 << 20

// mark is the domain of the attributes by which the devices of a choice are selected.
const mark = "oracle.example.com"

type history struct {
	Node    v1.Node                      `json:"node"`
	Slices  []*resourceapi.ResourceSlice `json:"slices"`
	Classes []*resourceapi.DeviceClass   `json:"classes"`
	Cases   []*oracleCase                `json:"cases"`
	// TimeoutMillis ends an allocation that has too many combinations.
	TimeoutMillis int64 `json:"timeoutMillis"`
}

type oracleCase struct {
	*history  `json:"-"`
	Allocated []resourceapi.AllocationResult `json:"allocated"`
	// Held are devices that no claim can have, in use by an earlier one or not.
	Held   []deviceName                  `json:"held"`
	Claim  *resourceapi.ResourceClaim    `json:"claim"`
	Choice *resourceapi.AllocationResult `json:"choice"`
}

type deviceName struct {
	Driver string `json:"driver"`
	Pool   string `json:"pool"`
	Device string `json:"device"`
}

func (name deviceName) id() structured.DeviceID {
	return structured.MakeDeviceID(name.Driver, name.Pool, name.Device)
}

type answer struct {
	Allocatable bool                          `json:"allocatable"`
	Allocation  *resourceapi.AllocationResult `json:"allocation,omitempty"`
	Error       string                        `json:"error,omitempty"`
	TimedOut    bool                          `json:"timedOut,omitempty"`
	Valid       bool                          `json:"valid"`
}

var celCache = cel.NewCache(1000, cel.Features{EnableConsumableCapacity: true, EnableListTypeAttributes: true})

var features = structured.Features{
	AdminAccess:             true,
	CompatibilityGroups:     true,
	ConsumableCapacity:      true,
	DerivedAttributes:       true,
	DeviceBindingAndStatus:  true,
	DeviceTaints:            true,
	FractionalCapacityRange: true,
	ListTypeAttributes:      true,
	OptionalNodeOperations:  true,
	PartitionableDevices:    true,
	PrioritizedList:         true,
}

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "allocator-oracle:", err)
		os.Exit(1)
	}
}

func run() error {
	lines := bufio.NewScanner(os.Stdin)
	lines.Buffer(nil, lineMax)
	out := bufio.NewWriter(os.Stdout)
	encoder := json.NewEncoder(out)
	for lines.Scan() {
		var h history
		if err := json.Unmarshal(lines.Bytes(), &h); err != nil {
			return fmt.Errorf("read a history: %w", err)
		}
		answers := make([]answer, 0, len(h.Cases))
		for _, c := range h.Cases {
			c.history = &h
			answers = append(answers, c.answer())
		}
		if err := encoder.Encode(answers); err != nil {
			return fmt.Errorf("write answers: %w", err)
		}
		if err := out.Flush(); err != nil {
			return fmt.Errorf("write answers: %w", err)
		}
	}
	return lines.Err()
}

func (c *oracleCase) answer() answer {
	resourceSlices := c.slices()
	allocation, err := c.allocate(resourceSlices, c.Claim)
	found := answer{Allocatable: allocation != nil, Allocation: allocation}
	if err != nil {
		found.Error = err.Error()
		found.TimedOut = errors.Is(err, context.DeadlineExceeded)
	}
	if c.Choice != nil {
		restricted, err := c.allocate(c.marked(resourceSlices), c.markedClaim())
		found.Valid = err == nil && restricted != nil && sameDevices(restricted, c.Choice)
	}
	return found
}

func (c *oracleCase) allocate(
	resourceSlices []*resourceapi.ResourceSlice, claim *resourceapi.ResourceClaim,
) (*resourceapi.AllocationResult, error) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Duration(c.TimeoutMillis)*time.Millisecond)
	defer cancel()
	allocator, err := structured.NewAllocator(ctx, features, c.state(), c, resourceSlices, celCache)
	if err != nil {
		return nil, err
	}
	results, err := allocator.Allocate(ctx, &c.Node, []*resourceapi.ResourceClaim{claim})
	if err != nil || len(results) == 0 {
		return nil, err
	}
	return &results[0], nil
}

// slices returns those of the history. Only a device that is in use consumes counters, and here one that is held does not.
func (c *oracleCase) slices() []*resourceapi.ResourceSlice {
	if len(c.Held) == 0 {
		return c.Slices
	}
	inUse := c.inUse()
	unused := sets.New[structured.DeviceID]()
	for _, held := range c.Held {
		if !structured.IsDeviceAllocated(held.id(), &inUse) {
			unused.Insert(held.id())
		}
	}
	found := make([]*resourceapi.ResourceSlice, 0, len(c.Slices))
	for _, slice := range c.Slices {
		slice = slice.DeepCopy()
		for i := range slice.Spec.Devices {
			device := &slice.Spec.Devices[i]
			if unused.Has(structured.MakeDeviceID(slice.Spec.Driver, slice.Spec.Pool.Name, device.Name)) {
				device.ConsumesCounters = nil
			}
		}
		found = append(found, slice)
	}
	return found
}

// state has held devices among those in use.
func (c *oracleCase) state() structured.AllocatedState {
	state := c.inUse()
	for _, held := range c.Held {
		state.AllocatedDevices.Insert(held.id())
	}
	return state
}

// inUse gathers what earlier claims have, as the scheduler's plugin does: admin access has nothing.
func (c *oracleCase) inUse() structured.AllocatedState {
	state := structured.AllocatedState{
		AllocatedDevices:         sets.New[structured.DeviceID](),
		AllocatedSharedDeviceIDs: sets.New[structured.SharedDeviceID](),
		AggregatedCapacity:       structured.NewConsumedCapacityCollection(),
	}
	for _, allocation := range c.Allocated {
		for _, result := range allocation.Devices.Results {
			id := structured.MakeDeviceID(result.Driver, result.Pool, result.Device)
			switch {
			case ptr.Deref(result.AdminAccess, false):
			case result.ShareID == nil:
				state.AllocatedDevices.Insert(id)
			default:
				state.AllocatedSharedDeviceIDs.Insert(structured.MakeSharedDeviceID(id, result.ShareID))
				if result.ConsumedCapacity != nil {
					state.AggregatedCapacity.Insert(structured.NewDeviceConsumedCapacity(id, result.ConsumedCapacity))
				}
			}
		}
	}
	return state
}

// Get makes the case the lister of its classes.
func (c *oracleCase) Get(name string) (*resourceapi.DeviceClass, error) {
	for _, class := range c.Classes {
		if class.Name == name {
			return class, nil
		}
	}
	return nil, fmt.Errorf("no DeviceClass %q", name)
}

func (c *oracleCase) List() ([]*resourceapi.DeviceClass, error) {
	return c.Classes, nil
}

// marked gives each device an attribute for each request: whether the choice has the device for it.
func (c *oracleCase) marked(resourceSlices []*resourceapi.ResourceSlice) []*resourceapi.ResourceSlice {
	marked := make([]*resourceapi.ResourceSlice, 0, len(resourceSlices))
	for _, slice := range resourceSlices {
		slice = slice.DeepCopy()
		for i := range slice.Spec.Devices {
			device := &slice.Spec.Devices[i]
			if device.Attributes == nil {
				device.Attributes = map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{}
			}
			for number, request := range c.Claim.Spec.Devices.Requests {
				chosen := slices.ContainsFunc(c.Choice.Devices.Results, func(result resourceapi.DeviceRequestAllocationResult) bool {
					return result.Driver == slice.Spec.Driver && result.Pool == slice.Spec.Pool.Name &&
						result.Device == device.Name && requestOf(result.Request) == request.Name
				})
				name := resourceapi.QualifiedName(fmt.Sprintf("%s/r%d", mark, number))
				device.Attributes[name] = resourceapi.DeviceAttribute{BoolValue: &chosen}
			}
		}
		marked = append(marked, slice)
	}
	return marked
}

// markedClaim selects marked devices first in each request that does not ask for all devices.
func (c *oracleCase) markedClaim() *resourceapi.ResourceClaim {
	claim := c.Claim.DeepCopy()
	for number := range claim.Spec.Devices.Requests {
		request := &claim.Spec.Devices.Requests[number]
		expression := fmt.Sprintf(`device.attributes[%q].r%d`, mark, number)
		selector := resourceapi.DeviceSelector{CEL: &resourceapi.CELDeviceSelector{Expression: expression}}
		if exactly := request.Exactly; exactly != nil && exactly.AllocationMode == resourceapi.DeviceAllocationModeExactCount {
			exactly.Selectors = slices.Insert(exactly.Selectors, 0, selector)
		}
		for i := range request.FirstAvailable {
			if sub := &request.FirstAvailable[i]; sub.AllocationMode == resourceapi.DeviceAllocationModeExactCount {
				sub.Selectors = slices.Insert(sub.Selectors, 0, selector)
			}
		}
	}
	return claim
}

func requestOf(name string) string {
	for i := range name {
		if name[i] == '/' {
			return name[:i]
		}
	}
	return name
}

// sameDevices compares devices and shares of two allocations, in whatever order.
func sameDevices(a, b *resourceapi.AllocationResult) bool {
	return sets.New(devicesOf(a)...).Equal(sets.New(devicesOf(b)...)) && len(a.Devices.Results) == len(b.Devices.Results)
}

func devicesOf(allocation *resourceapi.AllocationResult) []string {
	var devices []string
	for _, result := range allocation.Devices.Results {
		text := fmt.Sprintf("%s %s/%s/%s", result.Request, result.Driver, result.Pool, result.Device)
		names := make([]string, 0, len(result.ConsumedCapacity))
		for name := range result.ConsumedCapacity {
			names = append(names, string(name))
		}
		slices.Sort(names)
		for _, name := range names {
			amount := result.ConsumedCapacity[resourceapi.QualifiedName(name)]
			text += fmt.Sprintf(" %s=%s", name, amount.AsDec())
		}
		devices = append(devices, text)
	}
	return devices
}
