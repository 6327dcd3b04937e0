package main

import (
	"bufio"
	"encoding/json"
	"io"
	"os"
	"sync"
)

var printing sync.Mutex

// emit prints an event as a line of JSON.
func emit(event map[string]any) {
	line, err := json.Marshal(event)
	if err != nil {
		line, _ = json.Marshal(map[string]any{"event": "unprintable", "error": err.Error()})
	}
	printing.Lock()
	defer printing.Unlock()
	os.Stdout.Write(append(line, '\n'))
}

// untilInputEnds returns when the process that holds the other end of the standard input has ended.
func untilInputEnds() {
	_, _ = io.Copy(io.Discard, os.Stdin)
}

// eachLine calls handle with each line of the standard input, to its end.
func eachLine(handle func([]byte)) error {
	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() {
		handle(append([]byte(nil), lines.Bytes()...))
	}
	return lines.Err()
}
