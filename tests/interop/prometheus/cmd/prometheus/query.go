package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"time"

	"github.com/prometheus/prometheus/model/histogram"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/promql"
	"github.com/prometheus/prometheus/promql/parser"
	"github.com/prometheus/prometheus/storage"
	"github.com/prometheus/prometheus/tsdb/chunkenc"
	"github.com/prometheus/prometheus/tsdb/chunks"
	"github.com/prometheus/prometheus/util/annotations"
)

const (
	// scraped is the time of the first sample of each series, and period that until the second, which has the same value.
	scraped = 1_000_000
	period  = 15_000
)

// query prints what an expression gives after two scrapes of the files.
func query(files []string, expression string) error {
	var all series
	for _, file := range files {
		families, err := read(file)
		if err != nil {
			return err
		}
		for _, family := range families {
			for _, sample := range family.samples {
				named := labels.NewBuilder(sample.labels).Set("node", "node-1").Labels()
				points := []chunks.Sample{point{scraped, sample.value}, point{scraped + period, sample.value}}
				all = append(all, storage.NewListSeries(named, points))
			}
		}
	}
	engine := promql.NewEngine(promql.EngineOpts{
		MaxSamples: 1_000_000, Timeout: time.Minute, Parser: parser.NewParser(parser.Options{}),
	})
	ctx := context.Background()
	asked, err := engine.NewInstantQuery(ctx, all, nil, expression, time.UnixMilli(scraped+period))
	if err != nil {
		return err
	}
	defer asked.Close()
	found, err := asked.Exec(ctx).Vector()
	if err != nil {
		return err
	}
	output := json.NewEncoder(os.Stdout)
	for _, sample := range found {
		if err := output.Encode(map[string]any{"labels": sample.Metric.Map(), "value": fmt.Sprint(sample.F)}); err != nil {
			return err
		}
	}
	return nil
}

// series is a store in memory. It is its own querier.
type series []storage.Series

func (s series) Querier(int64, int64) (storage.Querier, error) { return s, nil }

func (s series) Select(_ context.Context, _ bool, _ *storage.SelectHints, matchers ...*labels.Matcher) storage.SeriesSet {
	found := &selected{}
	for _, one := range s {
		matches := true
		for _, matcher := range matchers {
			matches = matches && matcher.Matches(one.Labels().Get(matcher.Name))
		}
		if matches {
			found.series = append(found.series, one)
		}
	}
	return found
}

func (series) LabelValues(
	context.Context, string, *storage.LabelHints, ...*labels.Matcher,
) ([]string, annotations.Annotations, error) {
	return nil, nil, nil
}

func (series) LabelNames(
	context.Context, *storage.LabelHints, ...*labels.Matcher,
) ([]string, annotations.Annotations, error) {
	return nil, nil, nil
}

func (series) Close() error { return nil }

type selected struct {
	series []storage.Series
	next   int
}

func (s *selected) Next() bool {
	s.next++
	return s.next <= len(s.series)
}

func (s *selected) At() storage.Series { return s.series[s.next-1] }

func (*selected) Err() error { return nil }

func (*selected) Warnings() annotations.Annotations { return nil }

// point is a sample at a time.
type point struct {
	time  int64
	value float64
}

func (p point) T() int64                    { return p.time }
func (point) ST() int64                     { return 0 }
func (p point) F() float64                  { return p.value }
func (point) H() *histogram.Histogram       { return nil }
func (point) FH() *histogram.FloatHistogram { return nil }
func (point) Type() chunkenc.ValueType      { return chunkenc.ValFloat }
func (p point) Copy() chunks.Sample         { return p }
