//! Generates devices, and expressions that mostly fit their types.

use rand::Rng as _;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom as _;
use serde_json::{Value, json};

/// A device of some of the attributes that the expressions read, seldom with another type.
pub(super) fn device(random: &mut StdRng) -> Value {
    let mut attributes = serde_json::Map::new();
    for name in [
        "model",
        "index",
        "healthy",
        "version",
        "lanes",
        "tags",
        "other.example.com/model",
    ] {
        if random.random_bool(0.25) {
            continue;
        }
        let kind = if random.random_bool(0.1) {
            random.random_range(0..8)
        } else {
            match name {
                "index" => 0,
                "healthy" => 1,
                "version" => 3,
                "lanes" => 4,
                "tags" => 5,
                _ => 2,
            }
        };
        let text = |random: &mut StdRng| *TEXTS.choose(random).unwrap();
        let version = |random: &mut StdRng| {
            *["0.9.0", "1.2.3", "1.2.3-rc.1", "2.0.0+build"]
                .choose(random)
                .unwrap()
        };
        let count = random.random_range(1..4);
        attributes.insert(
            name.to_owned(),
            match kind {
                0 => json!({"int": random.random_range(-2..5)}),
                1 => json!({"bool": random.random_bool(0.5)}),
                2 => json!({"string": text(random)}),
                3 => json!({"version": version(random)}),
                4 => json!({"ints": (0..count).map(|_| random.random_range(-2..5)).collect::<Vec<i64>>()}),
                5 => json!({"strings": (0..count).map(|_| text(random)).collect::<Vec<_>>()}),
                6 => json!({"bools": (0..count).map(|_| random.random_bool(0.5)).collect::<Vec<_>>()}),
                _ => json!({"versions": (0..count).map(|_| version(random)).collect::<Vec<_>>()}),
            },
        );
    }
    let mut device = json!({"name": "gpu-0", "attributes": attributes, "capacity": {}});
    for name in ["memory", "other.example.com/cores"] {
        if random.random_bool(0.7) {
            device["capacity"][name] = json!({"value": QUANTITIES.choose(random).unwrap()});
        }
    }
    if random.random_bool(0.5) {
        device["allowMultipleAllocations"] = json!(random.random_bool(0.5));
    }
    device
}

const TEXTS: [&str; 10] = [
    "",
    "a",
    "a100",
    "b200",
    "fast",
    "Fast lane",
    "x,y,,z",
    " é→ ",
    "12",
    "true",
];
const QUANTITIES: [&str; 8] = ["0", "1", "80Gi", "81920Mi", "1500m", "-3", "2k", "1e3"];

#[derive(Clone, Copy, PartialEq)]
pub(super) enum Kind {
    Bool,
    Int,
    Uint,
    Double,
    Text,
    Ints,
    Texts,
    Quantity,
    Version,
    Dyn,
    Option,
    Map,
    Type,
}

const KINDS: [Kind; 13] = [
    Kind::Bool,
    Kind::Int,
    Kind::Uint,
    Kind::Double,
    Kind::Text,
    Kind::Ints,
    Kind::Texts,
    Kind::Quantity,
    Kind::Version,
    Kind::Dyn,
    Kind::Option,
    Kind::Map,
    Kind::Type,
];

/// Generates expressions that mostly fit their types.
pub(super) struct Generator<'a> {
    pub(super) random: &'a mut StdRng,
    /// The variables that the current part sees.
    pub(super) variables: Vec<(String, Kind)>,
}

impl Generator<'_> {
    /// An expression, whose result is mostly a bool.
    pub(super) fn selector(&mut self) -> String {
        let depth = self.random.random_range(1..5);
        let kind = if self.random.random_bool(0.97) {
            Kind::Bool
        } else {
            *KINDS.choose(self.random).unwrap()
        };
        self.of(kind, depth)
    }

    fn pick(&mut self, of: &[&str]) -> String {
        (*of.choose(self.random).unwrap()).to_owned()
    }

    /// An expression of the type, or seldom of another one.
    fn of(&mut self, kind: Kind, depth: usize) -> String {
        let roll = self.random.random_range(0..100);
        let kind = match roll {
            0..=1 => *KINDS[..12].choose(self.random).unwrap(),
            2..=9 if !matches!(kind, Kind::Type) => Kind::Dyn,
            _ => kind,
        };
        let known: Vec<String> = self
            .variables
            .iter()
            .filter(|(_, of)| *of == kind)
            .map(|(name, _)| name.clone())
            .collect();
        if !known.is_empty() && self.random.random_bool(0.4) {
            return known.choose(self.random).unwrap().clone();
        }
        if depth == 0 {
            return self.leaf(kind);
        }
        if self.random.random_bool(0.08) {
            return self.any(kind, depth - 1);
        }
        self.node(kind, depth - 1)
    }

    fn leaf(&mut self, kind: Kind) -> String {
        match kind {
            Kind::Bool => self.pick(&[
                "true",
                "false",
                "device.allowMultipleAllocations",
                "has(device.attributes['gpu.example.com'].model)",
            ]),
            Kind::Int => self.pick(&["0", "1", "-1", "3", "0x10", "9223372036854775807"]),
            Kind::Uint => self.pick(&["0u", "1u", "7u", "0x1Fu"]),
            Kind::Double => self.pick(&["0.0", "1.5", "-2.0", "3.0", "1e3", ".5"]),
            Kind::Text => {
                let text = *TEXTS.choose(self.random).unwrap();
                self.pick(&[
                    "device.driver",
                    &format!("'{text}'"),
                    &format!("\"{text}\""),
                    "r'\\d+'",
                    "'\\u00e9'",
                ])
            }
            Kind::Ints => self.pick(&["[]", "[1]", "[1, 2, 16]", "[3, 2, 1, 2]"]),
            Kind::Texts => self.pick(&["[]", "['a']", "['a', 'b', 'a']", "['a100', 'fast']"]),
            Kind::Quantity => {
                let text = *QUANTITIES.choose(self.random).unwrap();
                self.pick(&[
                    &format!("quantity('{text}')"),
                    "device.capacity['gpu.example.com'].memory",
                    "device.capacity['other.example.com'].cores",
                ])
            }
            Kind::Version => self.pick(&[
                "semver('1.2.3')",
                "semver('1.2.3-rc.1')",
                "semver('v01.2', true)",
                "semver('0.9.0+b')",
            ]),
            Kind::Dyn => {
                let name = self.pick(&[
                    "model", "index", "healthy", "version", "lanes", "tags", "missing",
                ]);
                self.pick(&[
                    &format!("device.attributes['gpu.example.com'].{name}"),
                    &format!("device.attributes['gpu.example.com']['{name}']"),
                    "device.attributes['other.example.com'].model",
                    "device.attributes['none'].model",
                    "dyn(1)",
                ])
            }
            Kind::Option => self.pick(&[
                "optional.of(1)",
                "optional.none()",
                "device.attributes['gpu.example.com'].?index",
                "device.attributes['gpu.example.com'][?'index']",
                "device.?attributes['gpu.example.com'].index",
            ]),
            Kind::Map => self.pick(&["{}", "{'a': 1}", "{'a': 1, 'b': 2}"]),
            Kind::Type => self.pick(&[
                "int",
                "string",
                "bool",
                "double",
                "uint",
                "list",
                "map",
                "type(null)",
            ]),
        }
    }

    /// Forms that exist for every type.
    fn any(&mut self, kind: Kind, depth: usize) -> String {
        match self.random.random_range(0..5) {
            0 => {
                let other = *KINDS.choose(self.random).unwrap();
                let value = self.of(other, depth);
                let name = format!("v{}", self.variables.len());
                let body = self.with(&name, other, |it| it.of(kind, depth));
                format!("cel.bind({name}, {value}, {body})")
            }
            1 => format!(
                "({} ? {} : {})",
                self.of(Kind::Bool, depth),
                self.of(kind, depth),
                self.of(kind, depth)
            ),
            2 => format!("{{'k': {}}}.k", self.of(kind, depth)),
            3 => format!(
                "[{}, {}][{}]",
                self.of(kind, depth),
                self.of(kind, depth),
                self.of(Kind::Int, 0)
            ),
            _ => format!(
                "optional.of({}).orValue({})",
                self.of(kind, depth),
                self.of(kind, depth)
            ),
        }
    }

    fn with<T>(&mut self, name: &str, kind: Kind, of: impl FnOnce(&mut Self) -> T) -> T {
        self.variables.push((name.to_owned(), kind));
        let made = of(self);
        self.variables.pop();
        made
    }

    fn comprehension(&mut self, depth: usize) -> (String, String, Kind) {
        let (range, element) = match self.random.random_range(0..4) {
            0 => (Kind::Ints, Kind::Int),
            1 => (Kind::Texts, Kind::Text),
            2 => (Kind::Map, Kind::Text),
            _ => (Kind::Dyn, Kind::Dyn),
        };
        (
            self.of(range, depth),
            format!("v{}", self.variables.len()),
            element,
        )
    }

    fn node(&mut self, kind: Kind, d: usize) -> String {
        use Kind::*;
        match kind {
            Bool => self.bool(d),
            Int => match self.random.random_range(0..14) {
                0 => format!(
                    "({} {} {})",
                    self.of(Int, d),
                    self.pick(&["+", "-", "*", "/", "%"]),
                    self.of(Int, d)
                ),
                1 => format!("-{}", self.of(Int, d)),
                2 => {
                    let of = *[Text, Ints, Texts, Map].choose(self.random).unwrap();
                    format!("size({})", self.of(of, d))
                }
                3 => format!("{}.size()", self.of(Text, d)),
                4 => format!(
                    "{}.{}({})",
                    self.of(Text, d),
                    self.pick(&["indexOf", "lastIndexOf"]),
                    self.of(Text, d)
                ),
                5 => format!(
                    "{}.{}({}, {})",
                    self.of(Text, d),
                    self.pick(&["indexOf", "lastIndexOf"]),
                    self.of(Text, d),
                    self.of(Int, d)
                ),
                6 => {
                    let of = *[Double, Uint, Text, Int, Dyn, Bool]
                        .choose(self.random)
                        .unwrap();
                    format!("int({})", self.of(of, d))
                }
                7 => format!(
                    "{}.{}()",
                    self.of(Ints, d),
                    self.pick(&["sum", "min", "max"])
                ),
                8 => format!(
                    "{}.{}({})",
                    self.of(Ints, d),
                    self.pick(&["indexOf", "lastIndexOf"]),
                    self.of(Int, d)
                ),
                9 => format!(
                    "{}.compareTo({})",
                    self.of(Quantity, d),
                    self.of(Quantity, d)
                ),
                10 => format!(
                    "{}.{}()",
                    self.of(Version, d),
                    self.pick(&["major", "minor", "patch"])
                ),
                11 => format!("sign({})", self.of(Quantity, d)),
                12 => format!("{}[{}]", self.of(Ints, d), self.of(Int, d)),
                _ => self.leaf(Int),
            },
            Uint => match self.random.random_range(0..3) {
                0 => format!(
                    "({} {} {})",
                    self.of(Uint, d),
                    self.pick(&["+", "-", "*", "/", "%"]),
                    self.of(Uint, d)
                ),
                1 => {
                    let of = *[Double, Uint, Text, Int].choose(self.random).unwrap();
                    format!("uint({})", self.of(of, d))
                }
                _ => self.leaf(Uint),
            },
            Double => match self.random.random_range(0..4) {
                0 => format!(
                    "({} {} {})",
                    self.of(Double, d),
                    self.pick(&["+", "-", "*", "/"]),
                    self.of(Double, d)
                ),
                1 => {
                    let of = *[Double, Uint, Text, Int].choose(self.random).unwrap();
                    format!("double({})", self.of(of, d))
                }
                2 => format!("{}.asApproximateFloat()", self.of(Quantity, d)),
                _ => self.leaf(Double),
            },
            Text => match self.random.random_range(0..12) {
                0 => format!("({} + {})", self.of(Text, d), self.of(Text, d)),
                1 => {
                    let of = *[Bool, Int, Uint, Double, Text, Dyn]
                        .choose(self.random)
                        .unwrap();
                    format!("string({})", self.of(of, d))
                }
                2 => format!(
                    "{}.{}()",
                    self.of(Text, d),
                    self.pick(&["lowerAscii", "upperAscii", "trim"])
                ),
                3 => format!("{}.charAt({})", self.of(Text, d), self.of(Int, d)),
                4 => format!(
                    "{}.replace({}, {})",
                    self.of(Text, d),
                    self.of(Text, d),
                    self.of(Text, d)
                ),
                5 => format!(
                    "{}.replace({}, {}, {})",
                    self.of(Text, d),
                    self.of(Text, d),
                    self.of(Text, d),
                    self.of(Int, d)
                ),
                6 => format!("{}.substring({})", self.of(Text, d), self.of(Int, d)),
                7 => format!(
                    "{}.substring({}, {})",
                    self.of(Text, d),
                    self.of(Int, d),
                    self.of(Int, d)
                ),
                8 => format!("{}.join({})", self.of(Texts, d), self.of(Text, d)),
                9 => {
                    let pattern = self.pattern(d);
                    format!("{}.find({pattern})", self.of(Text, d))
                }
                10 => format!(
                    "{}.{}()",
                    self.of(Texts, d),
                    self.pick(&["min", "max", "join"])
                ),
                _ => self.leaf(Text),
            },
            Ints => match self.random.random_range(0..6) {
                0 => format!("({} + {})", self.of(Ints, d), self.of(Ints, d)),
                1 => format!("[{}, {}]", self.of(Int, d), self.of(Int, d)),
                2 => {
                    let (range, name, of) = self.comprehension(d);
                    let body = self.with(&name, of, |it| it.of(Int, d));
                    format!("{range}.map({name}, {body})")
                }
                3 => {
                    let range = self.of(Ints, d);
                    let name = format!("v{}", self.variables.len());
                    let body = self.with(&name, Int, |it| it.of(Bool, d));
                    format!("{range}.filter({name}, {body})")
                }
                4 => {
                    let range = self.of(Ints, d);
                    let name = format!("v{}", self.variables.len());
                    let body = self.with(&name, Int, |it| (it.of(Bool, d), it.of(Int, d)));
                    format!("{range}.map({name}, {}, {})", body.0, body.1)
                }
                _ => format!("[{}, ?{}]", self.of(Int, d), self.of(Option, d)),
            },
            Texts => match self.random.random_range(0..5) {
                0 => format!("{}.split({})", self.of(Text, d), self.of(Text, d)),
                1 => format!(
                    "{}.split({}, {})",
                    self.of(Text, d),
                    self.of(Text, d),
                    self.of(Int, d)
                ),
                2 => {
                    let pattern = self.pattern(d);
                    format!("{}.findAll({pattern})", self.of(Text, d))
                }
                3 => {
                    let (range, name, of) = self.comprehension(d);
                    let body = self.with(&name, of, |it| it.of(Text, d));
                    format!("{range}.map({name}, {body})")
                }
                _ => format!("[{}, {}]", self.of(Text, d), self.of(Text, d)),
            },
            // The left operand only: the scheduler has no equality for a sum on the right.
            Quantity => self.leaf(Quantity),
            Version => match self.random.random_range(0..3) {
                0 => format!("semver({})", self.of(Text, d)),
                1 => format!("semver({}, {})", self.of(Text, d), self.of(Bool, d)),
                _ => self.leaf(Version),
            },
            Dyn => match self.random.random_range(0..4) {
                // The last one is a type, which the scheduler takes for a text in some places.
                0 => {
                    let of = *KINDS[..12].choose(self.random).unwrap();
                    format!("dyn({})", self.of(of, d))
                }
                1 => format!("device.attributes[{}].model", self.of(Text, d)),
                _ => self.leaf(Dyn),
            },
            Option => match self.random.random_range(0..7) {
                0 => format!("optional.of({})", self.of(Int, d)),
                1 => format!("optional.ofNonZeroValue({})", self.of(Int, d)),
                2 => format!("{}.or({})", self.of(Option, d), self.of(Option, d)),
                3 => {
                    let target = self.of(Option, d);
                    let name = format!("v{}", self.variables.len());
                    let body = self.with(&name, Int, |it| it.of(Int, d));
                    format!("{target}.optMap({name}, {body})")
                }
                4 => {
                    let target = self.of(Option, d);
                    let name = format!("v{}", self.variables.len());
                    let body = self.with(&name, Int, |it| it.of(Option, d));
                    format!("{target}.optFlatMap({name}, {body})")
                }
                5 => format!("{}[?{}]", self.of(Ints, d), self.of(Int, d)),
                _ => format!("{}.{}()", self.of(Ints, d), self.pick(&["first", "last"])),
            },
            Map => match self.random.random_range(0..2) {
                0 => format!(
                    "{{{}: {}, {}: {}}}",
                    self.of(Text, d),
                    self.of(Int, d),
                    self.of(Text, d),
                    self.of(Int, d)
                ),
                _ => format!(
                    "{{{}: {}, ?'opt': {}}}",
                    self.of(Text, d),
                    self.of(Int, d),
                    self.of(Option, d)
                ),
            },
            Type => {
                let of = *KINDS.choose(self.random).unwrap();
                format!("type({})", self.of(of, d))
            }
        }
    }

    fn pattern(&mut self, depth: usize) -> String {
        if self.random.random_bool(0.2) {
            return self.of(Kind::Text, depth);
        }
        self.pick(&[
            "'a'",
            "'^a.*$'",
            r"r'\d+'",
            r"'[[a-z]+'",
            r"r'[\w.]+'",
            "'(a|b)+?'",
            "'('",
            "'[^,]*'",
            "'(?i)FAST'",
            r"r'\bfast\b'",
        ])
    }

    fn bool(&mut self, d: usize) -> String {
        use Kind::*;
        match self.random.random_range(0..22) {
            0..=2 => format!("({} && {})", self.of(Bool, d), self.of(Bool, d)),
            3..=4 => format!("({} || {})", self.of(Bool, d), self.of(Bool, d)),
            5 => format!("!{}", self.of(Bool, d)),
            6..=8 => {
                let kind = *KINDS.choose(self.random).unwrap();
                format!(
                    "{} {} {}",
                    self.of(kind, d),
                    self.pick(&["==", "!="]),
                    self.of(kind, d)
                )
            }
            9..=10 => {
                let kinds = [Int, Uint, Double, Text, Dyn];
                let kind = *kinds.choose(self.random).unwrap();
                let other = if matches!(kind, Text | Dyn) {
                    kind
                } else {
                    kinds[self.random.random_range(0..3)]
                };
                format!(
                    "{} {} {}",
                    self.of(kind, d),
                    self.pick(&["<", "<=", ">", ">="]),
                    self.of(other, d)
                )
            }
            11 => {
                let (element, list) = *[(Int, Ints), (Text, Texts), (Text, Map), (Dyn, Dyn)]
                    .choose(self.random)
                    .unwrap();
                format!("{} in {}", self.of(element, d), self.of(list, d))
            }
            12 => format!(
                "{}.{}({})",
                self.of(Text, d),
                self.pick(&["contains", "startsWith", "endsWith"]),
                self.of(Text, d)
            ),
            13 => {
                let pattern = self.pattern(d);
                format!("{}.matches({pattern})", self.of(Text, d))
            }
            14..=15 => {
                let (range, name, of) = self.comprehension(d);
                let body = self.with(&name, of, |it| it.of(Bool, d));
                format!(
                    "{range}.{}({name}, {body})",
                    self.pick(&["all", "exists", "exists_one"])
                )
            }
            16 => format!(
                "{}.{}({})",
                self.of(Quantity, d),
                self.pick(&["isGreaterThan", "isLessThan"]),
                self.of(Quantity, d)
            ),
            17 => format!(
                "{}.{}({})",
                self.of(Version, d),
                self.pick(&["isGreaterThan", "isLessThan"]),
                self.of(Version, d)
            ),
            18 => {
                let list = *[Ints, Texts, Dyn].choose(self.random).unwrap();
                let of = *[Int, Text].choose(self.random).unwrap();
                format!("{}.includes({})", self.of(list, d), self.of(of, d))
            }
            19 => match self.random.random_range(0..6) {
                0 => format!(
                    "sets.{}({}, {})",
                    self.pick(&["contains", "equivalent", "intersects"]),
                    self.of(Ints, d),
                    self.of(Ints, d)
                ),
                1 => format!("isSemver({}, {})", self.of(Text, d), self.of(Bool, d)),
                2 => format!("isQuantity({})", self.leaf(Dyn)),
                3 => format!("{}.isSorted()", self.of(Ints, d)),
                4 => format!(
                    "{}.add({}).compareTo({}) == {}",
                    self.of(Quantity, d),
                    self.of(Quantity, d),
                    self.of(Quantity, d),
                    self.of(Int, 0)
                ),
                _ => format!(
                    "{}.sub({}) == {}",
                    self.of(Quantity, d),
                    self.of(Int, d),
                    self.of(Quantity, 0)
                ),
            },
            20 if self.random.random_bool(0.1) => {
                let of = *KINDS.choose(self.random).unwrap();
                format!("{} == null", self.of(of, d))
            }
            20 => {
                let option = self.of(Option, d);
                self.pick(&[
                    &format!("{option}.hasValue()"),
                    &format!("{option}.value() == 1"),
                    &format!("{option}.orValue(3) > 1"),
                ])
            }
            _ => {
                let name = self.pick(&["model", "index", "missing"]);
                format!(
                    "has({}.{name})",
                    self.pick(&[
                        "device.attributes['gpu.example.com']",
                        "device.attributes['none']",
                        "device.attributes",
                        "device",
                        "{'model': 1}",
                        "device.capacity['gpu.example.com']"
                    ])
                )
            }
        }
    }
}
