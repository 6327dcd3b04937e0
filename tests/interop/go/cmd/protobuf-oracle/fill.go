package main

import (
	"math/rand"
	"time"

	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/intstr"
	"sigs.k8s.io/randfill"
)

// texts are strings of objects: an empty one may be a value.
var texts = []string{"", "a", "gpu-0", "é→", "line\n\"two\"", "example.com/x"}

// filler fills objects with what their types can hold.
func filler(seed int64) *randfill.Filler {
	moment := func(random randfill.Continue) time.Time { return time.Unix(random.Int63n(4e9), 0).UTC() }
	document := func(random randfill.Continue) []byte {
		return []byte(`{"a":[1,"` + texts[1+random.Intn(3)] + `",{"f:b":{}}]}`)
	}
	return randfill.New().RandSource(rand.NewSource(seed)).NilChance(0.3).NumElements(1, 2).MaxDepth(40).Funcs(
		func(text *string, random randfill.Continue) { *text = texts[random.Intn(len(texts))] },
		func(kind *metav1.TypeMeta, _ randfill.Continue) {},
		func(number *int64, random randfill.Continue) { *number = random.Int63n(5) - 1 },
		func(number *int32, random randfill.Continue) { *number = random.Int31n(5) - 1 },
		func(at *metav1.Time, random randfill.Continue) {
			if random.Bool() {
				at.Time = moment(random)
			}
		},
		func(at *metav1.MicroTime, random randfill.Continue) {
			at.Time = moment(random).Add(time.Duration(random.Intn(1e6)) * time.Microsecond)
		},
		func(amount *resource.Quantity, random randfill.Continue) {
			*amount = *resource.NewMilliQuantity(random.Int63n(1e6), resource.BinarySI)
		},
		func(either *intstr.IntOrString, random randfill.Continue) {
			*either = intstr.FromInt32(random.Int31n(3))
			if random.Bool() {
				*either = intstr.FromString(texts[random.Intn(len(texts))])
			}
		},
		func(raw *runtime.RawExtension, random randfill.Continue) { raw.Raw = document(random) },
		func(fields *metav1.FieldsV1, random randfill.Continue) { fields.Raw = document(random) },
	)
}
