package main

import (
	"fmt"

	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/model/labels"
)

var kinds = map[model.MetricType]dto.MetricType{
	model.MetricTypeCounter:   dto.MetricType_COUNTER,
	model.MetricTypeGauge:     dto.MetricType_GAUGE,
	model.MetricTypeHistogram: dto.MetricType_HISTOGRAM,
}

// check does what `promtool check metrics` does, which reads the older text format: there a counter's name has its suffix.
func check(file string) error {
	families, err := read(file)
	if err != nil {
		return err
	}
	var all []*dto.MetricFamily
	for _, family := range families {
		kind, known := kinds[family.kind]
		if !known {
			return fmt.Errorf("%s is a %s", family.name, family.kind)
		}
		name := family.name
		if kind == dto.MetricType_COUNTER {
			name += "_total"
		}
		all = append(all, &dto.MetricFamily{Name: &name, Help: &family.help, Type: &kind, Metric: metrics(family, kind)})
	}
	problems, err := promlint.NewWithMetricFamilies(all).Lint()
	if err != nil {
		return err
	}
	for _, problem := range problems {
		fmt.Printf("%s %s\n", problem.Metric, problem.Text)
	}
	return nil
}

// metrics are the samples with their labels; of a histogram, one for each set of labels.
func metrics(family *family, kind dto.MetricType) []*dto.Metric {
	var all []*dto.Metric
	for _, sample := range family.samples {
		if kind == dto.MetricType_HISTOGRAM && sample.labels.Get(model.MetricNameLabel) != family.name+"_count" {
			continue
		}
		metric := &dto.Metric{}
		sample.labels.Range(func(label labels.Label) {
			if label.Name != model.MetricNameLabel {
				metric.Label = append(metric.Label, &dto.LabelPair{Name: &label.Name, Value: &label.Value})
			}
		})
		switch kind {
		case dto.MetricType_COUNTER:
			metric.Counter = &dto.Counter{Value: &sample.value}
		case dto.MetricType_GAUGE:
			metric.Gauge = &dto.Gauge{Value: &sample.value}
		case dto.MetricType_HISTOGRAM:
			metric.Histogram = &dto.Histogram{}
		}
		all = append(all, metric)
	}
	return all
}
