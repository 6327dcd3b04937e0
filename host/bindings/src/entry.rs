//! The module of a driver in Python or JavaScript whose functions the host calls. It calls the driver's sources.
//!
//! Around each call it makes what is printed lines of the driver's log, and logs an exception with its trace before it ends the instance,
//! so that the host has the text for the caller. It refuses at build time what the driver implements and its world does not export.

use crate::world::{Interface, World, lower_camel, snake};

/// Names of the files in the directory of the bindings.
const PYTHON: &str = "nodedock_entry.py";
const JAVASCRIPT: &str = "entry.js";
const JAVASCRIPT_BUILD: &str = "build.js";

type Files = Vec<(String, Vec<u8>)>;

pub(crate) fn python(world: &World) -> Files {
    let exports = world.exports.iter().map(|interface| {
        let functions = interface.functions.iter().map(|function| {
            let is_fallible = if function.is_fallible {
                "True"
            } else {
                "False"
            };
            format!("\"{}\": {is_fallible}", snake(&function.name))
        });
        let (name, functions) = (interface.upper_camel(), join(functions));
        format!("{name} = exported(\"{name}\", {{{functions}}})\n")
    });
    // By the name of the class, and by that of the module of its types.
    let names = |interface: &Interface| {
        let module = format!("wit_world.exports.{}", snake(&interface.name));
        vec![interface.upper_camel(), module]
    };
    let text = include_str!("entry.py")
        .replace("@REFUSALS@", &refusals(world, names, "driver.py"))
        .replace("@EXPORTS@\n", &exports.collect::<String>());
    vec![(PYTHON.to_owned(), text.into_bytes())]
}

pub(crate) fn javascript(world: &World) -> Files {
    let exports = world.exports.iter().map(|interface| {
        let functions = interface
            .functions
            .iter()
            .map(|function| format!("{}: {}", lower_camel(&function.name), function.is_fallible));
        let (name, id) = (lower_camel(&interface.name), &interface.id);
        let functions = join(functions);
        format!("export const {name} = exported(\"{name}\", \"{id}\", {{ {functions} }});\n")
    });
    let names = |interface: &Interface| vec![lower_camel(&interface.name)];
    let text = include_str!("entry.js")
        .replace("@LOG@", &world.log)
        .replace("@REFUSALS@", &refusals(world, names, "driver.js"))
        .replace("@EXPORTS@\n", &exports.collect::<String>());
    let build = include_bytes!("build.js").to_vec();
    vec![
        (JAVASCRIPT.to_owned(), text.into_bytes()),
        (JAVASCRIPT_BUILD.to_owned(), build),
    ]
}

fn join(items: impl Iterator<Item = String>) -> String {
    items.collect::<Vec<_>>().join(", ")
}

/// Returns the lines of a table: names of an interface that is not exported, and the refusal of its implementation.
fn refusals(world: &World, names: impl Fn(&Interface) -> Vec<String>, source: &str) -> String {
    let lines = world.unexported.iter().flat_map(|missing| {
        let refusal = missing.refusal(source);
        let names = names(&missing.interface).into_iter();
        names.map(move |name| format!("\"{name}\": \"{refusal}\""))
    });
    lines.collect::<Vec<_>>().join(",\n    ")
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn files(generate: fn(&World) -> Files, world: &str) -> Vec<String> {
        let contract = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../wit"));
        let files = generate(&World::read(contract, world).unwrap());
        files
            .into_iter()
            .map(|(_, bytes)| String::from_utf8(bytes).unwrap())
            .inspect(|text| {
                let placeholders = ["@LOG@", "@REFUSALS@", "@EXPORTS@"];
                assert!(
                    placeholders.iter().all(|name| !text.contains(name)),
                    "{text}"
                );
            })
            .collect()
    }

    #[test]
    fn python_entry_has_the_worlds_exports() {
        let text = files(python, "driver").remove(0);
        assert!(
            text.contains("Preparation = exported(\"Preparation\", {\"prepare\": False, \"unprepare\": False})\n"),
            "{text}"
        );
        assert!(
            text.contains("    \"Health\": \"driver.py implements health, which")
                && !text.contains("Health = "),
            "{text}"
        );
        let full = files(python, "full-driver").remove(0);
        assert!(
            full.contains("Health = exported(\"Health\", {\"check\": True})\n")
                && full.contains("\"config_schema\": False, ")
                && !full.contains("implements health"),
            "{full}"
        );
    }

    #[test]
    fn javascript_entry_has_the_worlds_exports() {
        let text = files(javascript, "driver").remove(0);
        let discovery = "export const discovery = exported(\"discovery\", \"nodedock:driver/discovery@0.2.0\", { discover: true });\n";
        assert!(text.contains(discovery), "{text}");
        assert!(
            text.contains("from \"nodedock:driver/log@0.2.0\"")
                && text.contains("    \"health\": \"driver.js implements health, which"),
            "{text}"
        );
        let full = files(javascript, "full-driver").remove(0);
        assert!(
            full.contains("{ configSchema: false, ") && full.contains("export const health"),
            "{full}"
        );
    }
}
