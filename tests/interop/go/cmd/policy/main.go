// Command policy evaluates requests with a ValidatingAdmissionPolicy as an API server does, with the same expression language. It reads one
// JSON object with the policy and the requests, and writes for each request "allow", "no match" or the reason of the denial.
package main

import (
	"encoding/json"
	"fmt"
	"os"

	"cel.dev/cel-go/cel"
	"cel.dev/cel-go/ext"
)

type named struct {
	Name              string `json:"name"`
	Expression        string `json:"expression"`
	Message           string `json:"message"`
	MessageExpression string `json:"messageExpression"`
}

type input struct {
	Policy struct {
		Spec struct {
			MatchConditions []named `json:"matchConditions"`
			Variables       []named `json:"variables"`
			Validations     []named `json:"validations"`
		} `json:"spec"`
	} `json:"policy"`
	Requests []struct {
		Request   map[string]any `json:"request"`
		Object    any            `json:"object"`
		OldObject any            `json:"oldObject"`
	} `json:"requests"`
}

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "policy:", err)
		os.Exit(1)
	}
}

func run() error {
	var in input
	if err := json.NewDecoder(os.Stdin).Decode(&in); err != nil {
		return err
	}
	// Extensions that an API server enables for policies: optional values, and functions of strings.
	env, err := cel.NewEnv(cel.OptionalTypes(), ext.Strings(ext.StringsVersion(2)),
		cel.Variable("request", cel.DynType), cel.Variable("object", cel.DynType),
		cel.Variable("oldObject", cel.DynType), cel.Variable("variables", cel.MapType(cel.StringType, cel.DynType)))
	if err != nil {
		return err
	}
	var verdicts []string
	for _, asked := range in.Requests {
		values := map[string]any{
			"request": asked.Request, "object": asked.Object, "oldObject": asked.OldObject, "variables": map[string]any{},
		}
		verdict, err := judge(env, &in, values)
		if err != nil {
			return err
		}
		verdicts = append(verdicts, verdict)
	}
	return json.NewEncoder(os.Stdout).Encode(verdicts)
}

func judge(env *cel.Env, in *input, values map[string]any) (string, error) {
	for _, condition := range in.Policy.Spec.MatchConditions {
		matches, err := evaluate(env, condition.Expression, values)
		if err != nil {
			return "", fmt.Errorf("condition %s: %w", condition.Name, err)
		}
		if matches != true {
			return "no match", nil
		}
	}
	variables := map[string]any{}
	values["variables"] = variables
	for _, variable := range in.Policy.Spec.Variables {
		value, err := evaluate(env, variable.Expression, values)
		if err != nil {
			return "", fmt.Errorf("variable %s: %w", variable.Name, err)
		}
		variables[variable.Name] = value
	}
	for _, validation := range in.Policy.Spec.Validations {
		holds, err := evaluate(env, validation.Expression, values)
		if err != nil {
			return "", fmt.Errorf("%s: %w", validation.Expression, err)
		}
		if holds == true {
			continue
		}
		if validation.MessageExpression == "" {
			return "deny: " + validation.Message, nil
		}
		message, err := evaluate(env, validation.MessageExpression, values)
		if err != nil {
			return "", fmt.Errorf("%s: %w", validation.MessageExpression, err)
		}
		return fmt.Sprint("deny: ", message), nil
	}
	return "allow", nil
}

func evaluate(env *cel.Env, expression string, values map[string]any) (any, error) {
	ast, issues := env.Compile(expression)
	if issues.Err() != nil {
		return nil, issues.Err()
	}
	program, err := env.Program(ast)
	if err != nil {
		return nil, err
	}
	value, _, err := program.Eval(values)
	if err != nil {
		return nil, err
	}
	return value.Value(), nil
}
