// Command cel-oracle evaluates selectors of devices as the scheduler of Kubernetes does.
//
//	cel-oracle < CASES
//
// Each line of the input is {"expression": string, "driver": string, "device": a device of a resource slice}. Each line of the output is
// {"compiles": bool, "error": string, "matches": bool or null, "evaluationError": string}, in the order of the input.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/cel"
)

type query struct {
	Expression string             `json:"expression"`
	Driver     string             `json:"driver"`
	Device     resourceapi.Device `json:"device"`
}

type verdict struct {
	Compiles        bool   `json:"compiles"`
	Error           string `json:"error,omitempty"`
	Matches         *bool  `json:"matches"`
	EvaluationError string `json:"evaluationError,omitempty"`
}

func main() {
	if err := run(os.Stdin, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "cel-oracle:", err)
		os.Exit(1)
	}
}

func run(in io.Reader, out io.Writer) error {
	buffered := bufio.NewWriter(out)
	cases, verdicts := json.NewDecoder(in), json.NewEncoder(buffered)
	for number := 1; ; number++ {
		var next query
		if err := cases.Decode(&next); err == io.EOF {
			return buffered.Flush()
		} else if err != nil {
			return fmt.Errorf("case %d: %w", number, err)
		}
		if err := verdicts.Encode(judge(next)); err != nil {
			return err
		}
	}
}

func judge(next query) (result verdict) {
	// The compiler panics on an optional element of unknown type: [?dyn(1), ?dyn(2)].
	defer func() {
		if cause := recover(); cause != nil {
			result = verdict{Error: fmt.Sprint("panic: ", cause)}
		}
	}()
	compiler := cel.GetCompiler(cel.Features{EnableConsumableCapacity: true, EnableListTypeAttributes: true})
	compiled := compiler.CompileCELExpression(next.Expression, cel.Options{DisableCostEstimation: true})
	if compiled.Error != nil {
		return verdict{Error: compiled.Error.Error()}
	}
	matches, _, err := compiled.DeviceMatches(context.Background(), cel.Device{
		Driver:                   next.Driver,
		AllowMultipleAllocations: next.Device.AllowMultipleAllocations,
		Attributes:               next.Device.Attributes,
		Capacity:                 next.Device.Capacity,
	})
	if err != nil {
		return verdict{Compiles: true, EvaluationError: err.Error()}
	}
	return verdict{Compiles: true, Matches: &matches}
}
