//! Answers of a guest from JSON, laid out in its memory as the canonical ABI has them, right or wrong.
//!
//! An omitted value is zero: an empty list, no option, the first case. Beside JSON's own values there are `{"$tag": n}` (this discriminant,
//! for any type), `{"$at": [pointer, length]}` (a string or list at this place), `{"$times": [n, value]}` (a text or an entry so many
//! times) and `{"$bytes": [..]}` (a text that need not be UTF-8).

use std::sync::LazyLock;

use serde_json::{Value, json};
use wit_parser::{PackageId, Resolve, SizeAlign, Type, TypeDefKind};

use super::super::guest::{Guest, push_contract};

const PAGE: u32 = 64 << 10;

struct Contract {
    resolve: Resolve,
    sizes: SizeAlign,
    package: PackageId,
}

static CONTRACT: LazyLock<Contract> = LazyLock::new(|| {
    let mut resolve = Resolve::default();
    let package = push_contract(&mut resolve, "0.2.0");
    let mut sizes = SizeAlign::default();
    sizes.fill(&resolve);
    Contract {
        resolve,
        sizes,
        package,
    }
});

impl Contract {
    fn answer(&self, interface: &str, function: &str) -> Type {
        let interface = self.resolve.packages[self.package].interfaces[interface];
        self.resolve.interfaces[interface].functions[function]
            .result
            .unwrap()
    }
}

/// A part of a guest's memory.
struct Image {
    base: u32,
    bytes: Vec<u8>,
}

impl Image {
    fn reserve(&mut self, size: usize, align: usize) -> usize {
        let at = self.bytes.len().next_multiple_of(align);
        self.bytes.resize(at + size, 0);
        at
    }

    fn put(&mut self, at: usize, bytes: &[u8]) {
        self.bytes[at..at + bytes.len()].copy_from_slice(bytes);
    }

    fn put_list(&mut self, at: usize, pointer: u32, count: u32) {
        self.put(at, &pointer.to_le_bytes());
        self.put(at + 4, &count.to_le_bytes());
    }

    fn address(&self, at: usize) -> u32 {
        self.base + u32::try_from(at).unwrap()
    }

    fn lower(&mut self, ty: Type, at: usize, value: &Value) {
        if value.is_null() {
            return;
        }
        if let Some(tag) = value.get("$tag") {
            return self.put(at, &[u8::try_from(tag.as_u64().unwrap()).unwrap()]);
        }
        if let Some(place) = value.get("$at") {
            return self.put_list(at, number(&place[0]), number(&place[1]));
        }
        match ty {
            Type::Bool => self.put(at, &[u8::from(value.as_bool().unwrap())]),
            Type::U8 => self.put(at, &[u8::try_from(value.as_u64().unwrap()).unwrap()]),
            Type::U32 => self.put(at, &number(value).to_le_bytes()),
            Type::S64 => self.put(at, &value.as_i64().unwrap().to_le_bytes()),
            Type::U64 => self.put(at, &value.as_u64().unwrap().to_le_bytes()),
            Type::F64 => self.put(at, &value.as_f64().unwrap().to_le_bytes()),
            Type::String => self.text(at, value),
            Type::Id(id) => self.lower_defined(&CONTRACT.resolve.types[id].kind, at, value),
            other => unreachable!("the contract has no {other:?}"),
        }
    }

    fn lower_defined(&mut self, kind: &TypeDefKind, at: usize, value: &Value) {
        match kind {
            TypeDefKind::Type(ty) => self.lower(*ty, at, value),
            // An array has the fields in their order.
            TypeDefKind::Record(record) if value.is_array() => {
                let offsets = CONTRACT
                    .sizes
                    .field_offsets(record.fields.iter().map(|field| &field.ty));
                for (index, (offset, ty)) in offsets.into_iter().enumerate() {
                    self.lower(*ty, at + offset.size_wasm32(), &value[index]);
                }
            }
            TypeDefKind::Record(record) => {
                let known = |name: &String| record.fields.iter().any(|field| field.name == *name);
                assert!(
                    value.as_object().unwrap().keys().all(known),
                    "{value} is not of the record"
                );
                let offsets = CONTRACT
                    .sizes
                    .field_offsets(record.fields.iter().map(|field| &field.ty));
                for (field, (offset, ty)) in record.fields.iter().zip(offsets) {
                    self.lower(*ty, at + offset.size_wasm32(), &value[&field.name]);
                }
            }
            TypeDefKind::Flags(flags) => {
                let is_set =
                    |flag: &wit_parser::Flag| value.as_array().unwrap().contains(&json!(flag.name));
                let bits = flags
                    .flags
                    .iter()
                    .enumerate()
                    .filter(|(_, flag)| is_set(flag));
                self.put(at, &[bits.map(|(index, _)| 1 << index).sum()]);
            }
            TypeDefKind::List(ty) => self.list(*ty, at, value),
            TypeDefKind::Option(ty) => self.case(at, 1, &[None, Some(*ty)], value),
            TypeDefKind::Result(result) => {
                let (tag, payload) = (
                    u8::from(value.get("err").is_some()),
                    value.get("err").or(value.get("ok")),
                );
                self.case(at, tag, &[result.ok, result.err], payload.unwrap());
            }
            TypeDefKind::Variant(variant) => {
                let (name, payload) = match value {
                    Value::String(name) => (name, &Value::Null),
                    value => value.as_object().unwrap().iter().next().unwrap(),
                };
                let tag = variant
                    .cases
                    .iter()
                    .position(|case| case.name == *name)
                    .unwrap();
                let types: Vec<_> = variant.cases.iter().map(|case| case.ty).collect();
                self.case(at, u8::try_from(tag).unwrap(), &types, payload);
            }
            TypeDefKind::Enum(cases) => {
                let tag = cases
                    .cases
                    .iter()
                    .position(|case| Some(case.name.as_str()) == value.as_str());
                self.put(at, &[u8::try_from(tag.unwrap()).unwrap()]);
            }
            other => unreachable!("the contract has no {}", other.as_str()),
        }
    }

    fn case(&mut self, at: usize, tag: u8, types: &[Option<Type>], payload: &Value) {
        self.put(at, &[tag]);
        let offset = CONTRACT
            .sizes
            .payload_offset(wit_parser::Int::U8, types.iter().map(Option::as_ref));
        if let Some(ty) = types[usize::from(tag)] {
            self.lower(ty, at + offset.size_wasm32(), payload);
        }
    }

    fn text(&mut self, at: usize, value: &Value) {
        let bytes: Vec<u8> = match value {
            Value::String(text) => text.clone().into_bytes(),
            value => match (value.get("$times"), value.get("$bytes")) {
                (Some(times), _) => times[1]
                    .as_str()
                    .unwrap()
                    .repeat(number(&times[0]) as usize)
                    .into_bytes(),
                (None, Some(bytes)) => serde_json::from_value(bytes.clone()).unwrap(),
                (None, None) => unreachable!("{value} is no text"),
            },
        };
        let place = self.reserve(bytes.len(), 1);
        self.put(place, &bytes);
        self.put_list(at, self.address(place), u32::try_from(bytes.len()).unwrap());
    }

    fn list(&mut self, ty: Type, at: usize, value: &Value) {
        let (size, align) = (
            CONTRACT.sizes.size(&ty).size_wasm32(),
            CONTRACT.sizes.align(&ty).align_wasm32(),
        );
        let (entries, times) = match value.get("$times") {
            Some(times) => (std::slice::from_ref(&times[1]), number(&times[0]) as usize),
            None => (value.as_array().unwrap().as_slice(), 1),
        };
        let place = self.reserve(size * entries.len() * times, align);
        for (index, entry) in entries.iter().enumerate() {
            self.lower(ty, place + index * size, entry);
        }
        let first = self.bytes[place..place + size * entries.len()].to_vec();
        for time in 1..times {
            self.put(place + time * first.len(), &first);
        }
        self.put_list(
            at,
            self.address(place),
            u32::try_from(entries.len() * times).unwrap(),
        );
    }
}

fn number(value: &Value) -> u32 {
    u32::try_from(value.as_u64().unwrap()).unwrap()
}

fn escaped(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("\\{byte:02x}")).collect()
}

impl Guest {
    /// Lays an answer behind all that is in the memory already, and gives its place.
    fn lay(&mut self, interface: &str, function: &str, value: &Value) -> u32 {
        let ty = CONTRACT.answer(interface, function);
        let mut image = Image {
            base: self.pages * PAGE,
            bytes: Vec::new(),
        };
        let at = image.reserve(
            CONTRACT.sizes.size(&ty).size_wasm32(),
            CONTRACT.sizes.align(&ty).align_wasm32(),
        );
        image.lower(ty, at, value);
        let pages = u32::try_from(image.bytes.len()).unwrap().div_ceil(PAGE);
        self.pages += pages;
        let used = image
            .bytes
            .iter()
            .rposition(|byte| *byte != 0)
            .map_or(0, |last| last + 1);
        self.extra += &format!(
            "(data (i32.const {}) \"{}\")",
            image.base,
            escaped(&image.bytes[..used])
        );
        image.address(at)
    }

    /// `describe` says this, where it does not say what every small driver says.
    pub(super) fn describes(mut self, changes: Value) -> Self {
        let mut info = json!({"name": super::super::guest::NAME, "version": "1.2.3"});
        info.as_object_mut()
            .unwrap()
            .extend(changes.as_object().unwrap().clone());
        let at = self.lay("identity", "describe", &info);
        self.describe = format!("i32.const {at}");
        self
    }

    /// `describe` asks for this.
    pub(super) fn asks(self, capabilities: Value) -> Self {
        self.describes(json!({"capabilities": capabilities}))
    }

    /// `discover` gives these pools.
    pub(super) fn has(self, pools: Value) -> Self {
        self.discovers(json!({"ok": {"pools": pools}}))
    }

    /// `discover` gives this.
    pub(in super::super) fn discovers(mut self, answer: Value) -> Self {
        let at = self.lay("discovery", "discover", &answer);
        self.discover = format!("i32.const {at}");
        self
    }

    /// `prepare` gives these outcomes.
    pub(super) fn answers(mut self, outcomes: Value) -> Self {
        let at = self.lay("preparation", "prepare", &outcomes);
        self.prepare = format!("i32.const {at}");
        self
    }

    /// `prepare` gives this for the only claim that is asked for.
    pub(super) fn prepares(self, claim: Value) -> Self {
        self.answers(json!([{"uid": super::UID, "outcome": {"ok": claim}}]))
    }

    /// `check` of the health facet gives this.
    pub(super) fn ails(mut self, answer: Value) -> Self {
        let at = self.lay("health", "check", &answer);
        self.world = "observable";
        self.extra += &format!(
            "(func (export \"nodedock:driver/health@0.2.0#check\")
               (param i32 i32 i32 i32 i32 i32 i64 i32 i32 i32 i32) (result i32) i32.const {at})"
        );
        self
    }

    /// `read` of the telemetry facet gives this.
    pub(in super::super) fn measures(mut self, answer: Value) -> Self {
        let at = self.lay("telemetry", "read", &answer);
        self.world = "measurable";
        self.extra += &format!(
            "(func (export \"nodedock:driver/telemetry@0.2.0#read\")
               (param i32 i32 i32 i32 i32 i32 i64 i32 i32 i32 i32) (result i32) i32.const {at})"
        );
        self
    }

    /// `list-devices` of the facet for devices that are left out gives this.
    pub(in super::super) fn leaves_out(mut self, answer: Value) -> Self {
        let at = self.lay("left-out", "list-devices", &answer);
        self.world = "selective";
        self.extra += &format!(
            "(func (export \"nodedock:driver/left-out@0.2.0#list-devices\")
               (param i32 i32 i32 i32 i32 i32 i64 i32 i32 i32 i32) (result i32) i32.const {at})"
        );
        self
    }

    /// `schedule` of the scheduling facet gives this.
    pub(in super::super) fn schedules(mut self, answer: Value) -> Self {
        let at = self.lay("scheduling", "schedule", &answer);
        self.world = "schedulable";
        self.extra += &format!(
            "(func (export \"nodedock:driver/scheduling@0.2.0#schedule\")
               (param i32 i32 i32 i32 i32 i32 i64 i32 i32 i32 i32 i32 i32) (result i32) i32.const {at})"
        );
        self
    }

    /// The configuration facet with this schema of the config.
    pub(super) fn demands(mut self, schema: Value) -> Self {
        let at = self.lay("configuration", "config-schema", &schema);
        self.world = "configurable";
        let name =
            |function: &str| format!("(export \"nodedock:driver/configuration@0.2.0#{function}\")");
        for function in ["config-schema", "parameters-schema"] {
            self.extra += &format!("(func {} (result i32) i32.const {at})", name(function));
        }
        for function in ["validate-config", "validate-parameters"] {
            self.extra += &format!(
                "(func {} (param i32 i32) (result i32) i32.const 8192)",
                name(function)
            );
        }
        self
    }

    /// The configuration facet with this schema of the parameters, and this body of `validate-parameters`: the parameter's place and length
    /// are the locals 0 and 1.
    pub(in super::super) fn validates(mut self, schema: Option<&Value>, validate: &str) -> Self {
        let schema = schema.map_or(Value::Null, |schema| json!(schema.to_string()));
        let none = self.lay("configuration", "config-schema", &Value::Null);
        let schema = self.lay("configuration", "parameters-schema", &schema);
        self.world = "configurable";
        let name =
            |function: &str| format!("(export \"nodedock:driver/configuration@0.2.0#{function}\")");
        for (function, at) in [("config-schema", none), ("parameters-schema", schema)] {
            self.extra += &format!("(func {} (result i32) i32.const {at})", name(function));
        }
        for (function, body) in [
            ("validate-config", "i32.const 8192"),
            ("validate-parameters", validate),
        ] {
            self.extra += &format!(
                "(func {} (param i32 i32) (result i32) {body})",
                name(function)
            );
        }
        self
    }

    /// The place of a problem that `validate-parameters` returns.
    pub(in super::super) fn verdict(&mut self, problem: &Value) -> u32 {
        self.lay(
            "configuration",
            "validate-parameters",
            &json!({ "err": problem }),
        )
    }

    /// `discover` calls a function of the host with one text, and answers with what it says: results of the host and of
    /// `discover` have their problems in the same place.
    pub(super) fn relays(self, interface: &str, function: &str, text: &str) -> Self {
        let call = format!(
            "(call $relay (i32.const 49152) (i32.const {}) (i32.const 8192))",
            text.len()
        );
        self.relays_by(interface, function, text, "i32 i32 i32", &call)
    }

    /// The same with a call of one's own; the text is at 49152.
    pub(super) fn relays_by(
        mut self,
        interface: &str,
        function: &str,
        text: &str,
        parameters: &str,
        call: &str,
    ) -> Self {
        self.imports += &format!(
            "(import \"nodedock:driver/{interface}@0.2.0\" \"{function}\" (func $relay (param {parameters})))"
        );
        self.extra += &format!("(data (i32.const 49152) \"{}\")", escaped(text.as_bytes()));
        self.discover = format!("{call} i32.const 8192");
        self
    }
}
