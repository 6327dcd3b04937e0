package main

import (
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/model/textparse"
)

const openMetrics = "application/openmetrics-text; version=1.0.0; charset=utf-8"

// family is a family of metrics. The names of its samples have the suffixes of its type.
type family struct {
	name, help string
	kind       model.MetricType
	samples    []sample
}

type sample struct {
	labels labels.Labels
	value  float64
}

// read returns the families of a file, in its order.
func read(file string) ([]*family, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	parser, err := textparse.New(text, openMetrics, labels.NewSymbolTable(), textparse.ParserOptions{})
	if err != nil {
		return nil, err
	}
	var families []*family
	named := func(name []byte) *family {
		if len(families) == 0 || families[len(families)-1].name != string(name) {
			families = append(families, &family{name: string(name)})
		}
		return families[len(families)-1]
	}
	for {
		entry, err := parser.Next()
		if errors.Is(err, io.EOF) {
			return families, nil
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
		switch entry {
		case textparse.EntryHelp:
			name, help := parser.Help()
			named(name).help = string(help)
		case textparse.EntryType:
			name, kind := parser.Type()
			named(name).kind = kind
		case textparse.EntrySeries:
			if len(families) == 0 {
				return nil, fmt.Errorf("%s: a sample before the first family", file)
			}
			_, _, value := parser.Series()
			var found labels.Labels
			parser.Labels(&found)
			last := families[len(families)-1]
			last.samples = append(last.samples, sample{found.Copy(), value})
		}
	}
}
