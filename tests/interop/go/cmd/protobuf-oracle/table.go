package main

import (
	"fmt"
	"io"
	"path"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// lineLength is the longest line of the table.
const lineLength = 140

// special are types whose JSON is not made of their fields.
var special = map[reflect.Type]string{
	reflect.TypeFor[metav1.Time]():          "time",
	reflect.TypeFor[metav1.MicroTime]():     "microtime",
	reflect.TypeFor[resource.Quantity]():    "quantity",
	reflect.TypeFor[intstr.IntOrString]():   "intOrString",
	reflect.TypeFor[runtime.RawExtension](): "json",
	reflect.TypeFor[metav1.FieldsV1]():      "json",
}

// messages are the messages that were found, by name.
type messages map[string][]field

type field struct {
	number int
	text   string
}

func writeTable(out io.Writer) error {
	found := messages{}
	for _, empty := range kinds {
		if _, err := found.name(reflect.TypeOf(empty()).Elem()); err != nil {
			return err
		}
	}
	names := make([]string, 0, len(found))
	for name := range found {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		line := name
		slices.SortFunc(found[name], func(a, b field) int { return a.number - b.number })
		for _, field := range found[name] {
			if len(line)+1+len(field.text) > lineLength {
				fmt.Fprintln(out, line)
				line = " "
			}
			line += " " + field.text
		}
		fmt.Fprintln(out, line)
	}
	return nil
}

// name returns how the table names a type, and adds its message.
func (m messages) name(of reflect.Type) (string, error) {
	if name, ok := special[of]; ok {
		return name, nil
	}
	switch of.Kind() {
	case reflect.String:
		return "text", nil
	case reflect.Int32, reflect.Int64:
		return "int", nil
	case reflect.Bool:
		return "bool", nil
	case reflect.Struct:
	default:
		return "", fmt.Errorf("%s is of a kind that the table does not have", of)
	}
	// k8s.io/api/core/v1 and k8s.io/apimachinery/pkg/apis/meta/v1
	name := path.Base(path.Dir(of.PkgPath())) + "." + of.Name()
	if _, ok := m[name]; ok {
		return name, nil
	}
	m[name] = nil
	for at := range of.NumField() {
		field, err := m.field(of.Field(at))
		if err != nil {
			return "", fmt.Errorf("%s: %w", of, err)
		}
		if field.number > 0 {
			m[name] = append(m[name], field)
		}
	}
	return name, nil
}

// field returns NAME:NUMBER:TYPE; "~" is before a type that JSON leaves out when it is zero, "*" before that of a list's items and "%"
// before that of a map's values. Without a type it is a text; without a name, the fields are those of the owner.
func (m messages) field(of reflect.StructField) (field, error) {
	tag := strings.Split(of.Tag.Get("protobuf"), ",")
	if len(tag) < 2 {
		// The type of the object, which the envelope has.
		return field{}, nil
	}
	number, err := strconv.Atoi(tag[1])
	if err != nil {
		return field{}, err
	}
	name, options, _ := strings.Cut(of.Tag.Get("json"), ",")
	kind, sign := of.Type, ""
	switch kind.Kind() {
	case reflect.Pointer:
		kind = kind.Elem()
	case reflect.Slice:
		kind, sign = kind.Elem(), "*"
	case reflect.Map:
		kind, sign = kind.Elem(), "%"
	default:
		if strings.Contains(options, "omit") {
			sign = "~"
		}
	}
	message, err := m.name(kind)
	if err != nil {
		return field{}, err
	}
	text := fmt.Sprintf("%s:%d", name, number)
	if sign+message != "text" {
		text += ":" + sign + message
	}
	return field{number, text}, nil
}
