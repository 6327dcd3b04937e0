// Package node has what the programs about a node of Kubernetes share: lines of JSON, the pods of the node, a client of the API server.
package node

import (
	"bufio"
	"encoding/json"
	"io"
	"os"
	"sync"
)

var printing sync.Mutex

// Emit prints an event as a line of JSON.
func Emit(event map[string]any) {
	line, err := json.Marshal(event)
	if err != nil {
		line, _ = json.Marshal(map[string]any{"event": "unprintable", "error": err.Error()})
	}
	printing.Lock()
	defer printing.Unlock()
	os.Stdout.Write(append(line, '\n'))
}

// UntilInputEnds returns when the process that holds the other end of the standard input has ended.
func UntilInputEnds() {
	_, _ = io.Copy(io.Discard, os.Stdin)
}

// EachLine calls handle with each line of the standard input, to its end.
func EachLine(handle func([]byte)) error {
	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() {
		handle(append([]byte(nil), lines.Bytes()...))
	}
	return lines.Err()
}
