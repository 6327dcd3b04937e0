//! The files of a new driver, embedded in the program: one list for each language. Pure.
//!
//! The sources of a template are those of a driver `my-gpu.example.com`, so that they build and have tests as they are.

use wit_parser::SourceMap;

use super::language::Language;

/// Values of the placeholders of a template.
#[derive(Debug)]
pub(super) struct Values<'a> {
    /// The driver's name.
    pub(super) name: &'a str,
    /// Stem of the names of the driver's files.
    pub(super) stem: &'a str,
    /// The dependency on the SDK, as in `Cargo.toml`.
    pub(super) sdk: &'a str,
    /// Note for readers of the workflow.
    pub(super) note: &'a str,
    /// Facets that the driver has, in the order of their names.
    pub(super) facets: &'a [String],
}

enum Content {
    /// Text with placeholders.
    Text(&'static str),
    Plain(&'static [u8]),
}

type File = (&'static str, Content);

/// What a driver with an optional interface of the contract has in addition.
struct Facet {
    name: &'static str,
    /// What joins it to the main source.
    joint: &'static str,
    files: &'static [File],
}

/// Differences between languages beside the sources.
struct Template {
    language: &'static str,
    source: &'static str,
    /// Instructions for installing the tools, for `README.md`.
    setup: &'static str,
    /// Steps of the workflow that build the driver.
    build: &'static str,
    files: &'static [File],
    facets: &'static [Facet],
}

macro_rules! text {
    ($path:literal) => {
        Content::Text(include_str!(concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/templates/driver/",
            $path
        )))
    };
}

/// A file of the repository.
macro_rules! plain {
    ($path:literal) => {
        Content::Plain(include_bytes!(concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../../",
            $path
        )))
    };
}

/// End of the name of a world of the contract with one facet.
const FACET_WORLD: &str = "-facet";
/// The contract's version is in its first file.
const CONTRACT: &str = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../wit/driver.wit"));

const COMMON: &[File] = &[
    ("README.md", text!("common/README.md")),
    ("my-gpu.grant.yaml", text!("common/grant.yaml")),
    ("golden.yaml", text!("common/golden.yaml")),
    (".github/workflows/driver.yml", text!("common/driver.yml")),
    (
        "machine/sys/devices/virtual/misc/fuse/uevent",
        text!("common/machine/fuse.uevent"),
    ),
    (
        "machine/sys/devices/virtual/misc/tun/uevent",
        text!("common/machine/tun.uevent"),
    ),
    (
        "wit/deps/nodedock-driver/claims.wit",
        plain!("wit/claims.wit"),
    ),
    (
        "wit/deps/nodedock-driver/common.wit",
        plain!("wit/common.wit"),
    ),
    (
        "wit/deps/nodedock-driver/container-edits.wit",
        plain!("wit/container-edits.wit"),
    ),
    (
        "wit/deps/nodedock-driver/driver.wit",
        plain!("wit/driver.wit"),
    ),
    (
        "wit/deps/nodedock-driver/facets.wit",
        plain!("wit/facets.wit"),
    ),
    ("wit/deps/nodedock-driver/host.wit", plain!("wit/host.wit")),
    (
        "wit/deps/nodedock-driver/inventory.wit",
        plain!("wit/inventory.wit"),
    ),
];

/// The world of a driver, which in Rust the SDK has.
const WORLD: File = ("wit/world.wit", text!("common/world.wit"));

/// What a facet adds to the golden file.
const GOLDEN: &[(&str, &str)] = &[
    (
        "health",
        "health:\n  nodes/fuse: healthy\n  nodes/net-tun: healthy\n",
    ),
    (
        "telemetry",
        "readings:\n  nodes/fuse:\n    nodes: 1.0\n  nodes/net-tun:\n    nodes: 1.0\n",
    ),
];

const RUST: Template = Template {
    language: "Rust",
    source: "src/lib.rs",
    setup: "The tools are [rustup](https://rustup.rs) and `rustup target add wasm32-unknown-unknown`. `cargo test` runs the unit tests, which need no \
            WebAssembly.",
    build: "      - run: rustup target add wasm32-unknown-unknown
      - run: cargo test
      - run: cargo build --release --target wasm32-unknown-unknown
      - run: cp target/wasm32-unknown-unknown/release/driver.wasm my-gpu.wasm",
    files: &[
        ("Cargo.toml", text!("rust/Cargo.toml")),
        ("src/lib.rs", text!("rust/lib.rs")),
        (".gitignore", Content::Text("/target/\n/my-gpu.wasm\n")),
    ],
    facets: &[
        Facet {
            name: "configuration",
            joint: "mod configuration;\n",
            files: &[(
                "src/configuration.rs",
                text!("facets/rust/configuration.rs"),
            )],
        },
        Facet {
            name: "health",
            joint: "mod health;\n",
            files: &[("src/health.rs", text!("facets/rust/health.rs"))],
        },
        Facet {
            name: "left-out",
            joint: "mod left_out;\n",
            files: &[("src/left_out.rs", text!("facets/rust/left_out.rs"))],
        },
        Facet {
            name: "scheduling",
            joint: "mod scheduling;\n",
            files: &[("src/scheduling.rs", text!("facets/rust/scheduling.rs"))],
        },
        Facet {
            name: "telemetry",
            joint: "mod telemetry;\n",
            files: &[("src/telemetry.rs", text!("facets/rust/telemetry.rs"))],
        },
    ],
};

const PYTHON: Template = Template {
    language: "Python",
    source: "driver.py",
    setup: "The tool is `componentize-py`, for Python 3.10 or newer: `python3 -m venv .venv && .venv/bin/pip install -r requirements.txt`. `nodedock driver build` \
            generates `bindings/` of `wit/`. `.venv/bin/python3 -m unittest` (Python 3.11 or newer) runs the unit tests, which need no WebAssembly; `nodedock/` has the helpers and the fake host.",
    build: "      - uses: actions/setup-python@v5
        with: {python-version: \"3.13\"}
      - run: pip install -r requirements.txt
      - run: python3 -m unittest
      - run: componentize-py -d wit -w driver componentize --stub-wasi -p . -p bindings nodedock_entry -o my-gpu.wasm",
    files: &[
        WORLD,
        ("driver.py", text!("python/driver.py")),
        ("test_driver.py", text!("python/test_driver.py")),
        (
            "nodedock/__init__.py",
            plain!("sdk/python/nodedock/__init__.py"),
        ),
        ("nodedock/sdk.py", plain!("sdk/python/nodedock/sdk.py")),
        (
            "nodedock/testing.py",
            plain!("sdk/python/nodedock/testing.py"),
        ),
        ("requirements.txt", text!("python/requirements.txt")),
        (
            ".gitignore",
            Content::Text("/.venv/\n__pycache__/\n/my-gpu.wasm\n"),
        ),
    ],
    facets: &[
        Facet {
            name: "configuration",
            joint: "from configuration import Configuration\n",
            files: &[("configuration.py", text!("facets/python/configuration.py"))],
        },
        Facet {
            name: "health",
            joint: "from health import Health\n",
            files: &[("health.py", text!("facets/python/health.py"))],
        },
        Facet {
            name: "left-out",
            joint: "from left_out import LeftOut\n",
            files: &[("left_out.py", text!("facets/python/left_out.py"))],
        },
        Facet {
            name: "scheduling",
            joint: "from scheduling import Scheduling\n",
            files: &[("scheduling.py", text!("facets/python/scheduling.py"))],
        },
        Facet {
            name: "telemetry",
            joint: "from telemetry import Telemetry\n",
            files: &[("telemetry.py", text!("facets/python/telemetry.py"))],
        },
    ],
};

const JAVASCRIPT: Template = Template {
    language: "JavaScript",
    source: "driver.js",
    setup: "The tools are Node.js 20 or newer and `npm install --ignore-scripts`. `nodedock driver build` generates `bindings/` of `wit/`. \
            `node --test driver.test.js` runs the unit tests, which need no WebAssembly; `nodedock/` has the helpers and the fake host.",
    build: "      - uses: actions/setup-node@v4
        with: {node-version: 22}
      - run: npm install --ignore-scripts
      - run: node --test driver.test.js
      - run: node bindings/build.js my-gpu.wasm",
    files: &[
        WORLD,
        ("driver.js", text!("javascript/driver.js")),
        ("driver.test.js", text!("javascript/driver.test.js")),
        ("nodedock/hooks.js", plain!("sdk/javascript/hooks.js")),
        (
            "nodedock/package.json",
            plain!("sdk/javascript/package.json"),
        ),
        ("nodedock/sdk.js", plain!("sdk/javascript/sdk.js")),
        ("nodedock/testing.js", plain!("sdk/javascript/testing.js")),
        ("package.json", text!("javascript/package.json")),
        (
            ".gitignore",
            Content::Text("/node_modules/\n/my-gpu.wasm\n"),
        ),
    ],
    facets: &[
        Facet {
            name: "configuration",
            joint: "export { configuration } from \"./configuration.js\";\n",
            files: &[(
                "configuration.js",
                text!("facets/javascript/configuration.js"),
            )],
        },
        Facet {
            name: "health",
            joint: "export { health } from \"./health.js\";\n",
            files: &[("health.js", text!("facets/javascript/health.js"))],
        },
        Facet {
            name: "left-out",
            joint: "export { leftOut } from \"./left-out.js\";\n",
            files: &[("left-out.js", text!("facets/javascript/left-out.js"))],
        },
        Facet {
            name: "scheduling",
            joint: "export { scheduling } from \"./scheduling.js\";\n",
            files: &[("scheduling.js", text!("facets/javascript/scheduling.js"))],
        },
        Facet {
            name: "telemetry",
            joint: "export { telemetry } from \"./telemetry.js\";\n",
            files: &[("telemetry.js", text!("facets/javascript/telemetry.js"))],
        },
    ],
};

const C: Template = Template {
    language: "C",
    source: "driver.c",
    setup: "The tools are, on Debian and Ubuntu, the packages `clang`, `lld`, `wasi-libc` and `libclang-rt-dev-wasm32` (with `clang-VERSION`: `libclang-rt-VERSION-dev-wasm32`). `nodedock driver build` \
            generates `bindings/` of `wit/`.",
    build:
        "      - run: sudo apt-get install --yes clang-18 lld-18 wasi-libc libclang-rt-18-dev-wasm32
      - run: >-
          clang-18 --target=wasm32-wasi -Os -nostartfiles -Wl,--no-entry -Wl,--strip-all
          *.c bindings/driver.c bindings/driver_component_type.o -o my-gpu.wasm",
    files: &[
        WORLD,
        ("driver.c", text!("c/driver.c")),
        ("nodes.h", text!("c/nodes.h")),
        (".gitignore", Content::Text("/my-gpu.wasm\n")),
    ],
    facets: &[
        Facet {
            name: "configuration",
            joint: "",
            files: &[("configuration.c", text!("facets/c/configuration.c"))],
        },
        Facet {
            name: "health",
            joint: "",
            files: &[("health.c", text!("facets/c/health.c"))],
        },
        Facet {
            name: "left-out",
            joint: "",
            files: &[("left_out.c", text!("facets/c/left_out.c"))],
        },
        Facet {
            name: "scheduling",
            joint: "",
            files: &[("scheduling.c", text!("facets/c/scheduling.c"))],
        },
        Facet {
            name: "telemetry",
            joint: "",
            files: &[("telemetry.c", text!("facets/c/telemetry.c"))],
        },
    ],
};

const GO: Template = Template {
    language: "Go",
    source: "driver/driver.go",
    setup: "The tool is [Go](https://go.dev) 1.25 or newer, without TinyGo. `nodedock driver build` generates `bindings/` of `wit/`; the packages in `exports/` give its \
            functions to the bindings. It makes a component of the module that Go builds. \
            `go test ./driver` runs the unit tests, which need no WebAssembly; `nodedock/` has the helpers and the fake host.",
    build: "      - uses: actions/setup-go@v5
        with: {go-version: \"1.25\"}
      - run: go vet -unsafeptr=false ./driver
      - run: go test ./driver
      - run: GOOS=wasip1 GOARCH=wasm go build -buildmode=c-shared -ldflags='-s -w -checklinkname=0' -o module.wasm .
      - run: $NODEDOCK driver build --module module.wasm # into my-gpu.wasm",
    files: &[
        WORLD,
        ("go.mod", text!("go/go.mod")),
        ("go.sum", text!("go/go.sum")),
        ("main.go", text!("go/main.go")),
        ("driver/driver.go", text!("go/driver.go")),
        ("driver/driver_test.go", text!("go/driver_test.go")),
        ("nodedock/go.mod", plain!("sdk/go/go.mod")),
        ("nodedock/go.sum", plain!("sdk/go/go.sum")),
        ("nodedock/host.go", plain!("sdk/go/host.go")),
        ("nodedock/nodedock.go", plain!("sdk/go/nodedock.go")),
        (
            "nodedock/nodedocktest/host.go",
            plain!("sdk/go/nodedocktest/host.go"),
        ),
        (
            "exports/export_nodedock_driver_discovery/export.go",
            text!("go/exports/discovery.go"),
        ),
        (
            "exports/export_nodedock_driver_identity/export.go",
            text!("go/exports/identity.go"),
        ),
        (
            "exports/export_nodedock_driver_preparation/export.go",
            text!("go/exports/preparation.go"),
        ),
        (
            ".gitignore",
            Content::Text("/my-gpu.wasm\n/module.wasm\n"),
        ),
    ],
    facets: &[
        Facet {
            name: "configuration",
            joint: "",
            files: &[
                ("driver/configuration.go", text!("facets/go/configuration.go")),
                (
                    "exports/export_nodedock_driver_configuration/export.go",
                    text!("facets/go/export_configuration.go"),
                ),
            ],
        },
        Facet {
            name: "health",
            joint: "",
            files: &[
                ("driver/health.go", text!("facets/go/health.go")),
                (
                    "exports/export_nodedock_driver_health/export.go",
                    text!("facets/go/export_health.go"),
                ),
            ],
        },
        Facet {
            name: "left-out",
            joint: "",
            files: &[
                ("driver/left_out.go", text!("facets/go/left_out.go")),
                (
                    "exports/export_nodedock_driver_left_out/export.go",
                    text!("facets/go/export_left_out.go"),
                ),
            ],
        },
        Facet {
            name: "scheduling",
            joint: "",
            files: &[
                ("driver/scheduling.go", text!("facets/go/scheduling.go")),
                (
                    "exports/export_nodedock_driver_scheduling/export.go",
                    text!("facets/go/export_scheduling.go"),
                ),
            ],
        },
        Facet {
            name: "telemetry",
            joint: "",
            files: &[
                ("driver/telemetry.go", text!("facets/go/telemetry.go")),
                (
                    "exports/export_nodedock_driver_telemetry/export.go",
                    text!("facets/go/export_telemetry.go"),
                ),
            ],
        },
    ],
};

/// Returns the facets of the contract, in the order of their names.
pub(super) fn facets() -> Vec<String> {
    let mut contract = SourceMap::default();
    for (path, content) in COMMON {
        if let Content::Plain(bytes) = content {
            contract.push_str(path, String::from_utf8_lossy(bytes));
        }
    }
    let parsed = contract.parse().map_err(|(_, error)| error);
    let package = parsed.expect("the contract is valid WIT, as every build of the SDK shows");
    let worlds = package.main.worlds.iter();
    let names = worlds.filter_map(|(_, world)| world.name.strip_suffix(FACET_WORLD));
    let mut facets: Vec<_> = names.map(str::to_owned).collect();
    facets.sort();
    facets
}

/// Returns the files of a new driver by path, without generated ones.
pub(super) fn files(language: Language, values: &Values<'_>) -> Vec<(String, Vec<u8>)> {
    let template = template(language);
    let facets = template
        .facets
        .iter()
        .filter(|facet| values.facets.iter().any(|name| name == facet.name));
    COMMON
        .iter()
        .chain(template.files)
        .chain(facets.flat_map(|facet| facet.files))
        .map(|(path, content)| {
            let bytes = match content {
                Content::Text(text) => fill(text, template, values).into_bytes(),
                Content::Plain(bytes) => bytes.to_vec(),
            };
            (fill(path, template, values), bytes)
        })
        .collect()
}

fn template(language: Language) -> &'static Template {
    match language {
        Language::Rust => &RUST,
        Language::Go => &GO,
        Language::Python => &PYTHON,
        Language::JavaScript => &JAVASCRIPT,
        Language::C => &C,
    }
}

/// Texts of the facets of a driver.
struct Facets {
    /// In the main source.
    joints: String,
    /// Names of traits after that of the driver, in Rust.
    traits: String,
    /// In the world.
    includes: String,
    golden: String,
}

impl Facets {
    fn new(template: &Template, names: &[String]) -> Self {
        let has = |name: &str| names.iter().any(|facet| facet == name);
        let joints = template.facets.iter().filter(|facet| has(facet.name));
        let traits: Vec<_> = names.iter().map(|name| trait_name(name)).collect();
        let include =
            |name| format!("    include nodedock:driver/{name}{FACET_WORLD}@@CONTRACT@;\n");
        let golden = GOLDEN.iter().filter(|(name, _)| has(name));
        Self {
            joints: joints.map(|facet| facet.joint).collect(),
            traits: match traits.as_slice() {
                [] => String::new(),
                traits => format!(": {}", traits.join(", ")),
            },
            includes: names.iter().map(include).collect(),
            golden: golden.map(|(_, text)| *text).collect(),
        }
    }
}

/// Returns the name of a facet's trait in the SDK for Rust: `LeftOut` of `left-out`.
fn trait_name(facet: &str) -> String {
    let words = facet.split('-').flat_map(|word| {
        let mut letters = word.chars();
        let first = letters.next().map(|first| first.to_ascii_uppercase());
        first.into_iter().chain(letters)
    });
    words.collect()
}

fn fill(text: &str, template: &Template, values: &Values<'_>) -> String {
    let env = values.stem.to_uppercase().replace('-', "_");
    let contract = CONTRACT
        .lines()
        .find_map(|line| line.strip_prefix("package nodedock:driver@"));
    let contract = contract.unwrap_or_default().trim_end_matches(';');
    let facets = Facets::new(template, values.facets);
    let has_world = template.files.iter().any(|(path, _)| *path == WORLD.0);
    let world = if has_world {
        "; what this driver exports is in `wit/world.wit`"
    } else {
        ""
    };
    // These have placeholders themselves; of the others, the whole name comes before a part of it.
    let text = replace(
        text,
        &[
            ("@SETUP@", template.setup),
            ("@BUILD@", template.build),
            // The template in Rust is compiled as it is by a test of the SDK.
            ("// @FACETS@\n", &facets.joints),
            ("@FACETS@", &facets.joints),
            (" /* @TRAITS@ */", &facets.traits),
            ("@INCLUDES@", &facets.includes),
            ("@GOLDEN@", &facets.golden),
            ("@WORLD@", world),
        ],
    );
    let all = [
        ("@LANGUAGE@", template.language),
        ("@SOURCE@", template.source),
        ("@NOTE@", values.note),
        ("@SDK@", values.sdk),
        ("@VERSION@", env!("CARGO_PKG_VERSION")),
        ("@CONTRACT@", contract),
        ("my-gpu.example.com", values.name),
        ("my-gpu", values.stem),
        ("MY_GPU", &env),
    ];
    replace(&text, &all)
}

/// Replaces placeholders in one pass: a value that contains a placeholder stays as it is. At one place the first of the list counts.
fn replace(text: &str, all: &[(&str, &str)]) -> String {
    let mut filled = String::with_capacity(text.len());
    let mut rest = text;
    loop {
        let found = all
            .iter()
            .filter_map(|(placeholder, value)| Some((rest.split_once(placeholder)?, value)));
        let Some(((before, after), value)) = found.min_by_key(|((before, _), _)| before.len())
        else {
            break;
        };
        filled.push_str(before);
        filled.push_str(value);
        rest = after;
    }
    filled + rest
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    const LANGUAGES: [Language; 5] = [
        Language::Rust,
        Language::Go,
        Language::Python,
        Language::JavaScript,
        Language::C,
    ];

    fn files_of(language: Language) -> BTreeMap<String, Vec<u8>> {
        files_with(language, &[])
    }

    fn files_with(language: Language, facets: &[String]) -> BTreeMap<String, Vec<u8>> {
        let values = Values {
            name: "fast-nic.example.org",
            stem: "fast-nic",
            sdk: "\"0.1\"",
            note: "",
            facets,
        };
        let all = files(language, &values);
        let count = all.len();
        let all: BTreeMap<_, _> = all.into_iter().collect();
        assert_eq!(all.len(), count, "no path occurs twice");
        all
    }

    #[test]
    fn templates_are_filled_and_have_wit() {
        let wit = std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../../wit")).unwrap();
        let wit: Vec<_> = wit
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        for (language, facets) in LANGUAGES
            .into_iter()
            .flat_map(|language| [(language, vec![]), (language, facets())])
        {
            let all = files_with(language, &facets);
            for name in &wit {
                assert!(
                    all.contains_key(&format!("wit/deps/nodedock-driver/{name}")),
                    "{language:?} lacks {name}"
                );
            }
            for (path, bytes) in &all {
                let text = String::from_utf8(bytes.clone()).unwrap();
                let placeholder = [
                    "NAME", "STEM", "ENV", "SDK", "SETUP", "BUILD", "NOTE", "CONTRACT", "VERSION",
                    "FACETS", "TRAITS", "INCLUDES", "GOLDEN", "WORLD",
                ]
                .iter()
                .find(|name| text.contains(&format!("@{name}@")));
                assert_eq!(placeholder, None, "{language:?} {path}");
                assert!(!path.contains('@'), "{path}");
                let example = ["my-gpu", "MY_GPU"]
                    .iter()
                    .find(|name| text.contains(*name));
                assert_eq!(example, None, "{language:?} {path}");
            }
        }
    }

    /// A facet that the contract gains needs a template in each language.
    #[test]
    fn every_facet_has_a_template() {
        let facets = facets();
        assert_eq!(
            facets,
            [
                "configuration",
                "health",
                "left-out",
                "scheduling",
                "telemetry"
            ]
        );
        for language in LANGUAGES {
            let names: Vec<_> = template(language)
                .facets
                .iter()
                .map(|facet| facet.name)
                .collect();
            assert_eq!(names, facets, "{language:?}");
            for facet in &facets {
                let all = files_with(language, std::slice::from_ref(facet));
                let file = facet.replace('-', "_");
                let added = all
                    .keys()
                    .filter(|path| path.replace('-', "_").contains(&file))
                    .count();
                assert!(
                    added > 0 && all.len() == files_of(language).len() + added,
                    "{language:?}"
                );
                let world = all
                    .get("wit/world.wit")
                    .map(|text| String::from_utf8_lossy(text));
                let included = format!("    include nodedock:driver/{facet}-facet@0.");
                assert!(
                    language == Language::Rust
                        || world.is_some_and(|text| text.contains(&included)),
                    "{language:?} {facet}"
                );
            }
        }
        let rust = files_with(Language::Rust, &facets);
        let rust = String::from_utf8_lossy(&rust["src/lib.rs"]);
        assert!(
            rust.contains(
                "export_driver!(NodeDriver: Configuration, Health, LeftOut, Scheduling, Telemetry);"
            ) && rust.contains("mod configuration;\nmod health;\n"),
            "{rust}"
        );
    }

    #[test]
    fn go_requires_what_its_bindings_import() {
        let files = files_of(Language::Go);
        for file in ["go.mod", "go.sum"] {
            let text = String::from_utf8(files[file].clone()).unwrap();
            let requirement = nodedock_bindings::go_requirement();
            assert!(text.contains(&requirement), "{file}: {requirement}");
        }
    }

    #[test]
    fn helpers_import_the_contract_of_wit() {
        let text = String::from_utf8(files_of(Language::JavaScript)["nodedock/sdk.js"].clone());
        let contract = CONTRACT
            .lines()
            .find_map(|line| line.strip_prefix("package "));
        let (package, version) = contract
            .unwrap()
            .trim_end_matches(';')
            .split_once('@')
            .unwrap();
        let import = format!("from \"{package}/sysfs@{version}\";");
        assert!(text.unwrap().contains(&import), "{import}");
    }

    #[test]
    fn names_are_filled_in() {
        let text =
            |language, path: &str| String::from_utf8(files_of(language)[path].clone()).unwrap();
        assert!(
            text(Language::JavaScript, "driver.js").contains("\"nodedock:driver/device-nodes@0.")
        );
        assert!(text(Language::Rust, "Cargo.toml").contains("nodedock-sdk = \"0.1\""));
        for (language, source) in [
            (Language::Rust, "src/lib.rs"),
            (Language::Python, "driver.py"),
        ] {
            let text = text(language, source);
            assert!(
                text.contains("\"fast-nic.example.org\"") && text.contains("FAST_NIC_"),
                "{text}"
            );
        }
        assert!(text(Language::C, "driver.c").contains("\"fast-nic.example.org\""));
        assert!(text(Language::C, "nodes.h").contains("FAST_NIC_"));
        let grant = text(Language::C, "fast-nic.grant.yaml");
        let grant = nodedock_model::grant::Grant::parse(&grant).unwrap();
        assert_eq!(grant.allowed.env, ["FAST_NIC_*"]);
    }

    /// `my-gpu-a100.example.com` became `my-gpu-a100-a100.example.com`: each placeholder was replaced in text that was filled already.
    #[test]
    fn placeholders_in_values_are_kept() {
        let sdk = "{ path = \"/src/my-gpu/MY_GPU/@NOTE@/sdk\" }";
        let name = "my-gpu-a100.my-gpu.example.com";
        let values = Values {
            name,
            stem: "my-gpu-a100",
            sdk,
            note: "",
            facets: &[],
        };
        for language in LANGUAGES {
            let all: BTreeMap<_, _> = files(language, &values).into_iter().collect();
            let text = |path: &str| String::from_utf8(all[path].clone()).unwrap();
            assert!(
                text("golden.yaml").contains(&format!("\ndriver: {name}\n")),
                "{language:?}"
            );
            assert!(
                text("golden.yaml").contains("- MY_GPU_A100_FUSE=/dev/fuse\n"),
                "{language:?}"
            );
            assert!(
                text("README.md").starts_with(&format!("# {name}\n")),
                "{language:?}"
            );
            assert!(
                text("my-gpu-a100.grant.yaml").contains("- MY_GPU_A100_*\n"),
                "{language:?}"
            );
            assert!(
                text(".github/workflows/driver.yml").contains("check my-gpu-a100.wasm "),
                "{language:?}"
            );
            if language == Language::Rust {
                let lines = format!("name = \"my-gpu-a100-driver\"\n|nodedock-sdk = {sdk}\n");
                assert!(
                    lines
                        .split('|')
                        .all(|line| text("Cargo.toml").contains(line)),
                    "{}",
                    text("Cargo.toml")
                );
            }
        }
    }

    #[test]
    fn workflow_is_yaml_for_its_language() {
        for language in LANGUAGES {
            let text =
                String::from_utf8(files_of(language)[".github/workflows/driver.yml"].clone())
                    .unwrap();
            let workflow: serde_json::Value = serde_saphyr::from_str(&text).unwrap();
            let steps = workflow["jobs"]["driver"]["steps"].as_array().unwrap();
            let runs: Vec<_> = steps
                .iter()
                .filter_map(|step| step["run"].as_str())
                .collect();
            let (tools, tests) = runs.split_at(runs.len() - 3);
            assert!(tools.iter().any(|run| run.contains(".wasm")), "{text}");
            for (run, command) in tests.iter().zip(["driver check", "driver test", "conform"]) {
                let wanted = format!("$NODEDOCK {command} fast-nic.wasm --hardware machine");
                assert!(run.starts_with(&wanted), "{text}");
            }
        }
    }
}
