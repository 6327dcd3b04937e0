//! The world of a project: the interfaces that its driver exports, and those of the contract that it does not.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use wit_bindgen_core::wit_parser::{
    Function as WitFunction, InterfaceId, PackageId, Resolve, Type, TypeDefKind, WorldId, WorldItem,
};

/// The package of the contract.
const NAMESPACE: &str = "nodedock";
const PACKAGE: &str = "driver";
/// The contract's minimum for a driver, which other worlds include.
const MINIMUM: &str = "driver";
const LOG: &str = "log";

/// A function of an interface.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Function {
    /// Name in WIT: `config-schema`.
    pub name: String,
    /// Returns a `result`, whose error is a value of the language.
    pub is_fallible: bool,
}

/// An interface of the contract that a driver may export.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Interface {
    /// Name in WIT: `health`.
    pub name: String,
    /// Name with package and version: `nodedock:driver/health@0.2.0`.
    pub id: String,
    pub functions: Vec<Function>,
}

impl Interface {
    /// Name of the type or variable that implements it: `NodeHealth` of `node-health`.
    #[must_use]
    pub fn upper_camel(&self) -> String {
        upper_camel(&self.name)
    }

    /// Name of the package in a project in Go that implements it.
    #[must_use]
    pub fn go_package(&self) -> String {
        format!("export_{NAMESPACE}_{PACKAGE}_{}", snake(&self.name))
    }

    /// Names of the functions in C that implement it.
    pub fn c_functions(&self) -> impl Iterator<Item = String> {
        self.functions.iter().map(|function| {
            let (interface, function) = (snake(&self.name), snake(&function.name));
            format!("exports_{NAMESPACE}_{PACKAGE}_{interface}_{function}")
        })
    }
}

/// An interface of the contract that a world does not export.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unexported {
    pub interface: Interface,
    /// The contract's smallest world with it: `nodedock:driver/health-facet@0.2.0`.
    pub world: String,
    /// The world that lacks it.
    of: String,
}

impl Unexported {
    /// Refuses an implementation of the interface, which would not be in the driver. `found` names it.
    #[must_use]
    pub fn refusal(&self, found: &str) -> String {
        let Self {
            interface,
            world,
            of,
        } = self;
        format!(
            "{found} implements {}, which the world {of} does not export, so that the host would never call it: add `include {world};` to the world {of} in wit/",
            interface.name
        )
    }
}

/// What a driver exports, and what the contract has in addition.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct World {
    /// Interfaces of the contract in the order of the world.
    pub exports: Vec<Interface>,
    pub unexported: Vec<Unexported>,
    /// The interface of the host's log, with package and version.
    pub log: String,
}

impl World {
    /// Reads a world of the WIT package in a directory.
    ///
    /// # Errors
    ///
    /// Fails if the directory has no valid WIT package or the package no such world, and if the world does not include the contract's
    /// minimum.
    pub fn read(wit: &Path, world: &str) -> Result<Self> {
        let (resolve, id) = select(wit, world)?;
        let shown = wit.display();
        let contract = contract_id(&resolve)
            .with_context(|| format!("{shown} has no package {NAMESPACE}:{PACKAGE}"))?;
        let minimum = resolve.packages[contract].worlds.get(MINIMUM);
        let minimum = *minimum.with_context(|| {
            format!("the package {NAMESPACE}:{PACKAGE} in {shown} has no world {MINIMUM}")
        })?;
        let (exported, log) = (exports(&resolve, id), resolve.id_of_name(contract, LOG));
        let has_minimum = exports(&resolve, minimum)
            .iter()
            .all(|interface| exported.contains(interface))
            && imported(&resolve, id, &log);
        let name = resolve.id_of_name(contract, MINIMUM);
        ensure!(
            has_minimum,
            "the world {world} in {shown} is no driver's: add `include {name};`"
        );
        Ok(Self {
            exports: exported
                .iter()
                .map(|id| interface(&resolve, *id))
                .collect::<Result<_>>()?,
            unexported: unexported(&resolve, contract, &exported, world)?,
            log,
        })
    }
}

/// Reads the package in a directory and finds its world.
pub(crate) fn select(wit: &Path, world: &str) -> Result<(Resolve, WorldId)> {
    let shown = wit.display();
    let mut resolve = Resolve::default();
    let (package, _) = resolve
        .push_dir(wit)
        .with_context(|| format!("read the WIT files in {shown}"))?;
    let id = resolve
        .select_world(&[package], Some(world))
        .with_context(|| format!("find the world {world} in {shown}"))?;
    Ok((resolve, id))
}

fn contract_id(resolve: &Resolve) -> Option<PackageId> {
    let mut packages = resolve.packages.iter();
    packages
        .find(|(_, package)| package.name.namespace == NAMESPACE && package.name.name == PACKAGE)
        .map(|(id, _)| id)
}

/// Interfaces with names that a world exports.
fn exports(resolve: &Resolve, world: WorldId) -> Vec<InterfaceId> {
    let items = resolve.worlds[world].exports.values();
    items.filter_map(interface_of).collect()
}

fn interface_of(item: &WorldItem) -> Option<InterfaceId> {
    match item {
        WorldItem::Interface { id, .. } => Some(*id),
        WorldItem::Function(_) | WorldItem::Type { .. } => None,
    }
}

/// Returns whether a world imports an interface.
fn imported(resolve: &Resolve, world: WorldId, id: &str) -> bool {
    let mut items = resolve.worlds[world].imports.values();
    items.any(|item| {
        interface_of(item)
            .and_then(|found| resolve.id_of(found))
            .as_deref()
            == Some(id)
    })
}

fn interface(resolve: &Resolve, id: InterfaceId) -> Result<Interface> {
    let found = &resolve.interfaces[id];
    let (name, full) = found
        .name
        .clone()
        .zip(resolve.id_of(id))
        .context("the world exports an interface without a name")?;
    Ok(Interface {
        name,
        id: full,
        functions: found
            .functions
            .values()
            .map(|function| Function {
                name: function.name.clone(),
                is_fallible: is_fallible(resolve, function),
            })
            .collect(),
    })
}

fn is_fallible(resolve: &Resolve, function: &WitFunction) -> bool {
    match function.result {
        Some(Type::Id(id)) => matches!(resolve.types[id].kind, TypeDefKind::Result(_)),
        _ => false,
    }
}

/// Interfaces that a world of the contract exports and this one does not.
fn unexported(
    resolve: &Resolve,
    contract: PackageId,
    exported: &[InterfaceId],
    world: &str,
) -> Result<Vec<Unexported>> {
    let mut worlds: Vec<_> = resolve.packages[contract].worlds.iter().collect();
    worlds.sort_by_key(|(_, id)| exports(resolve, **id).len());
    let mut seen = exported.to_vec();
    let mut found = Vec::new();
    for (name, id) in worlds {
        for missing in exports(resolve, *id) {
            if seen.contains(&missing) {
                continue;
            }
            seen.push(missing);
            found.push(Unexported {
                interface: interface(resolve, missing)?,
                world: resolve.id_of_name(contract, name),
                of: world.to_owned(),
            });
        }
    }
    Ok(found)
}

fn upper_camel(name: &str) -> String {
    name.split('-').map(capitalised).collect()
}

/// Returns the name of a variable or function in JavaScript: `configSchema` of `config-schema`.
pub(crate) fn lower_camel(name: &str) -> String {
    let (first, rest) = name.split_once('-').unwrap_or((name, ""));
    first.to_owned() + &upper_camel(rest)
}

/// Returns the name of a function in C and Python: `config_schema` of `config-schema`.
pub(crate) fn snake(name: &str) -> String {
    name.replace('-', "_")
}

fn capitalised(word: &str) -> String {
    let mut letters = word.chars();
    let first = letters.next().into_iter().flat_map(char::to_uppercase);
    first.chain(letters).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONTRACT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../wit");

    fn names(interfaces: &[Interface]) -> Vec<&str> {
        interfaces
            .iter()
            .map(|interface| interface.name.as_str())
            .collect()
    }

    /// Makes the directory of a project, whose package has the contract below it.
    fn project(world: &str) -> tempfile::TempDir {
        let directory = tempfile::tempdir().unwrap();
        let contract = directory.path().join("deps/nodedock-driver");
        std::fs::create_dir_all(&contract).unwrap();
        for file in std::fs::read_dir(CONTRACT).unwrap() {
            let file = file.unwrap();
            std::fs::copy(file.path(), contract.join(file.file_name())).unwrap();
        }
        let text = format!("package local:driver;\nworld driver {{ {world} }}\n");
        std::fs::write(directory.path().join("world.wit"), text).unwrap();
        directory
    }

    #[test]
    fn project_exports_what_its_world_includes() {
        let directory = project(
            "include nodedock:driver/driver@0.2.0; include nodedock:driver/health-facet@0.2.0;",
        );
        let world = World::read(directory.path(), "driver").unwrap();
        assert_eq!(
            names(&world.exports),
            ["identity", "discovery", "preparation", "health"]
        );
        assert_eq!(world.log, "nodedock:driver/log@0.2.0");
        let health = &world.exports[3];
        assert_eq!(health.id, "nodedock:driver/health@0.2.0");
        assert!(health.functions[0].name == "check" && health.functions[0].is_fallible);
        assert!(!world.exports[0].functions[0].is_fallible);
        let without: Vec<_> = world
            .unexported
            .iter()
            .map(|missing| (missing.interface.name.as_str(), missing.world.as_str()))
            .collect();
        assert_eq!(
            without,
            [
                ("configuration", "nodedock:driver/configuration-facet@0.2.0"),
                ("scheduling", "nodedock:driver/scheduling-facet@0.2.0"),
                ("telemetry", "nodedock:driver/telemetry-facet@0.2.0"),
                ("left-out", "nodedock:driver/left-out-facet@0.2.0"),
            ]
        );
        let refusal = world.unexported[0].refusal("driver.py");
        assert!(
            refusal
                .starts_with("driver.py implements configuration, which the world driver does not")
                && refusal.contains("add `include nodedock:driver/configuration-facet@0.2.0;`"),
            "{refusal}"
        );
    }

    #[test]
    fn contract_itself_is_a_project() {
        let contract = Path::new(CONTRACT);
        let world = World::read(contract, "driver").unwrap();
        assert_eq!(
            names(&world.exports),
            ["identity", "discovery", "preparation"]
        );
        let full = World::read(contract, "full-driver").unwrap();
        assert!(full.unexported.is_empty(), "{:?}", full.unexported);
    }

    #[test]
    fn world_without_the_minimum_is_refused() {
        let directory = project("include nodedock:driver/health-facet@0.2.0;");
        let error = World::read(directory.path(), "driver").unwrap_err();
        assert!(
            format!("{error:#}").contains("add `include nodedock:driver/driver@0.2.0;`"),
            "{error:#}"
        );
        std::fs::write(
            directory.path().join("world.wit"),
            "package a:b;\nworld driver { export run: func(); }\n",
        )
        .unwrap();
        std::fs::remove_dir_all(directory.path().join("deps")).unwrap();
        let error = World::read(directory.path(), "driver").unwrap_err();
        assert!(
            format!("{error:#}").contains("has no package nodedock:driver"),
            "{error:#}"
        );
    }

    #[test]
    fn names_follow_each_language() {
        let interface = Interface {
            name: "node-health".into(),
            id: String::new(),
            functions: vec![Function {
                name: "check-now".into(),
                is_fallible: true,
            }],
        };
        assert_eq!(interface.upper_camel(), "NodeHealth");
        assert_eq!(lower_camel(&interface.name), "nodeHealth");
        assert_eq!(interface.go_package(), "export_nodedock_driver_node_health");
        assert_eq!(
            interface.c_functions().collect::<Vec<_>>(),
            ["exports_nodedock_driver_node_health_check_now"]
        );
    }
}
