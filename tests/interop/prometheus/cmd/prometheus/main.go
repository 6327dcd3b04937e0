// Command prometheus has the parts of Prometheus that read the daemon's metrics: its parser, the checks of `promtool check metrics`, and its
// query engine. The metrics are OpenMetrics text in files.
//
//	prometheus check FILE          prints a line for each problem of the metrics
//	prometheus query FILE... EXPR  prints the series that an expression gives of all files, each as a line of JSON
//
// Samples have the label node="node-1", which a scrape adds.
package main

import (
	"fmt"
	"os"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintf(os.Stderr, "prometheus: %v\n", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	switch {
	case len(args) == 2 && args[0] == "check":
		return check(args[1])
	case len(args) >= 3 && args[0] == "query":
		return query(args[1:len(args)-1], args[len(args)-1])
	}
	return fmt.Errorf("usage: prometheus check FILE, or prometheus query FILE... EXPR")
}
