package main

import (
	"encoding/json"
	"fmt"
	"slices"
)

// byServer are fields that the server sets, whatever is sent.
var byServer = []string{"resourceVersion", "generation", "managedFields", "uid", "creationTimestamp"}

// answered fails if a request has failed, or if its answer does not have what was sent. The server may add defaults.
func answered(kind, what string, sent, answer object, err error) error {
	if err != nil {
		return fmt.Errorf("%s: %s: %w", kind, what, err)
	}
	var both [2]any
	for at, object := range []object{sent, answer} {
		text, err := json.Marshal(object)
		if err != nil {
			return err
		}
		if err := json.Unmarshal(text, &both[at]); err != nil {
			return err
		}
	}
	if missing := lost(both[0], both[1], kind); missing != "" {
		return fmt.Errorf("after %s, %s", what, missing)
	}
	return nil
}

// lost returns the first field of what was sent that is not the same in the answer.
func lost(sent, answer any, path string) string {
	switch sent := sent.(type) {
	case map[string]any:
		found, _ := answer.(map[string]any)
		for name, value := range sent {
			if slices.Contains(byServer, name) {
				continue
			}
			if missing := lost(value, found[name], path+"."+name); missing != "" {
				return missing
			}
		}
		return ""
	case []any:
		found, _ := answer.([]any)
		if len(found) != len(sent) {
			return fmt.Sprintf("%s has %d items, not %d", path, len(found), len(sent))
		}
		for at := range sent {
			if missing := lost(sent[at], found[at], fmt.Sprintf("%s[%d]", path, at)); missing != "" {
				return missing
			}
		}
		return ""
	}
	if sent != nil && sent != answer {
		return fmt.Sprintf("%s is %v, not %v", path, answer, sent)
	}
	return ""
}
