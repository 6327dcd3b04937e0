//! The WIT packages in a core module, and their dependencies.
//!
//! `wit-parser` and `wit-component` (0.254) sort them by their dependencies without checking for cycles: packages that depend on each other in
//! a circle, which no WIT text can declare and a damaged or hostile file can, overflow their stack. So they are checked first, by
//! the types that `wasmparser` finds.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use wasmparser::component_types::{
    ComponentAnyTypeId, ComponentEntityType, ComponentInstanceTypeId, ComponentTypeId,
};
use wasmparser::types::Types;
use wasmparser::{BinaryReader, Validator, WasmFeatures};

use nodedock_base::printable::printable;

/// The contract's and those of WASI are about ten.
const PACKAGES_MAX: usize = 64;
/// Component types in each other: a package has worlds, which have interfaces.
const DEPTH_MAX: usize = 8;
/// First byte of a section in the format before 2023, which the encoder still reads; others are a component.
const OLD_FORMAT: u8 = 3;

/// The packages of all sections of a module, which the encoder merges, each with those that it needs.
#[derive(Default)]
pub(crate) struct WitPackages(BTreeMap<String, BTreeSet<String>>);

impl WitPackages {
    /// Adds the packages of a section. The encoder refuses sections that are not valid.
    pub(crate) fn add(&mut self, section: &[u8]) -> Result<(), String> {
        let Some(component) = component(section) else {
            return Ok(());
        };
        let mut validator = Validator::new_with_features(WasmFeatures::all());
        let Ok(types) = validator.validate_all(component) else {
            return Ok(());
        };
        let mut reader = Reader {
            packages: self,
            types: &types,
            owners: HashMap::new(),
        };
        let top = (0..types.as_ref().component_type_count())
            .map(|at| types.as_ref().component_any_type_at(at));
        for id in top.collect::<Vec<_>>() {
            if let ComponentAnyTypeId::Component(id) = id {
                reader.component(None, id, 0)?;
            }
        }
        Ok(())
    }

    /// Refuses packages that cannot be sorted.
    pub(crate) fn check(&self) -> Result<(), String> {
        if self.0.len() > PACKAGES_MAX {
            return Err(format!(
                "its WIT has {} packages, at most {PACKAGES_MAX} are allowed",
                self.0.len()
            ));
        }
        let mut left: BTreeSet<&String> = self.0.keys().collect();
        while let Some(first) = left.first().copied() {
            let before = left.clone();
            left.retain(|name| self.0[*name].iter().any(|other| before.contains(other)));
            if left == before {
                let name = printable(first, 128);
                return Err(format!(
                    "packages of its WIT need each other in a circle, among them {name}"
                ));
            }
        }
        Ok(())
    }

    fn needs(&mut self, package: &str, other: &str) {
        if package != other {
            self.0
                .entry(package.to_owned())
                .or_default()
                .insert(other.to_owned());
        }
    }
}

/// Returns the component of a section.
fn component(section: &[u8]) -> Option<&[u8]> {
    if section.first() != Some(&OLD_FORMAT) {
        return Some(section);
    }
    let mut reader = BinaryReader::new(section, 0);
    reader
        .read_bytes(2)
        .and_then(|_| reader.read_string())
        .ok()?;
    section.get(reader.current_position()..)
}

/// Returns the package of a qualified name: `a:b@1.0.0` of `a:b/c@1.0.0`. `None`: the name is a local one.
fn package_of(name: &str) -> Option<String> {
    let (package, rest) = name.split_once('/')?;
    let version = rest
        .split_once('@')
        .map(|(_, version)| format!("@{version}"));
    Some(format!("{package}{}", version.unwrap_or_default()))
}

/// Reads the types of a section.
struct Reader<'a> {
    packages: &'a mut WitPackages,
    types: &'a Types,
    /// The package whose interface defines a type, or uses it under a name of its own.
    owners: HashMap<ComponentAnyTypeId, String>,
}

impl Reader<'_> {
    /// Reads the interfaces of a world, or the worlds and interfaces of a package. `package`: of the world.
    fn component(
        &mut self,
        package: Option<&str>,
        id: ComponentTypeId,
        depth: usize,
    ) -> Result<(), String> {
        if depth > DEPTH_MAX {
            return Err(format!(
                "its WIT has component types {depth} deep, at most {DEPTH_MAX} are allowed"
            ));
        }
        let types = self.types;
        let component = &types[id];
        for (name, item) in component.imports.iter().chain(&component.exports) {
            let of_item = package_of(name);
            if let (Some(package), Some(of_item)) = (package, &of_item) {
                self.packages.needs(package, of_item);
            }
            match item.ty {
                ComponentEntityType::Instance(id) => {
                    self.instance(of_item.as_deref().or(package), id)
                }
                ComponentEntityType::Component(id) => {
                    self.component(of_item.as_deref().or(package), id, depth + 1)?
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Reads the types of an interface, of which those of other packages are aliases.
    fn instance(&mut self, package: Option<&str>, id: ComponentInstanceTypeId) {
        let Some(package) = package else { return };
        let types = self.types;
        self.packages.0.entry(package.to_owned()).or_default();
        for item in types[id].exports.values() {
            let ComponentEntityType::Type {
                referenced,
                created,
            } = item.ty
            else {
                continue;
            };
            let mut next = Some(referenced);
            while let Some(id) = next {
                if let Some(owner) = self.owners.get(&id) {
                    self.packages.needs(package, owner);
                    break;
                }
                next = types.peel_alias(id);
            }
            self.owners.insert(created, package.to_owned());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::admission::{self, Surface};

    fn check(needs: &[(&str, &[&str])]) -> Result<(), String> {
        let set = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        WitPackages(
            needs
                .iter()
                .map(|(name, needs)| ((*name).to_owned(), set(needs)))
                .collect(),
        )
        .check()
    }

    #[test]
    fn cyclic_packages_are_refused() {
        check(&[("a:a", &[]), ("b:b", &["a:a"]), ("c:c", &["a:a", "b:b"])]).unwrap();
        let error =
            check(&[("a:a", &[]), ("b:b", &["a:a", "d:d"]), ("d:d", &["b:b"])]).unwrap_err();
        assert!(error.contains("circle, among them b:b"), "{error}");
    }

    /// Modules that fuzzing found: two overflowed the stack, in the encoder and in the parser, and one made the parser panic.
    #[test]
    fn damaged_wit_is_refused_without_panic() {
        let circle =
            include_bytes!("../../../../fuzz/seeds/admission/refused-circle-of-packages.wasm");
        let types = include_bytes!(
            "../../../../fuzz/seeds/admission/refused-types-that-panic-wit-parser.wasm"
        );
        let in_one =
            include_bytes!("../../../../fuzz/seeds/admission/refused-circle-in-one-section.wasm");
        for (file, why) in [
            (&circle[..], "circle"),
            (&in_one[..], "circle"),
            (&types[..], "damaged"),
        ] {
            let mut surface = Surface::default();
            let error = admission::admit(file, &mut surface).unwrap_err();
            assert!(error.code() == "not-a-driver", "{error:?}");
            assert!(error.to_string().contains(why), "{error}");
        }
    }

    #[test]
    fn contract_packages_are_the_declared_ones() {
        let module = crate::tests::guest::Guest::default().module();
        let mut packages = WitPackages::default();
        for payload in wasmparser::Parser::new(0).parse_all(&module) {
            if let wasmparser::Payload::CustomSection(section) = payload.unwrap()
                && section.name().starts_with("component-type")
            {
                packages.add(section.data()).unwrap();
            }
        }
        assert!(
            packages.0.contains_key("nodedock:driver@0.2.0"),
            "{:?}",
            packages.0
        );
        packages.check().unwrap();
    }

    #[test]
    fn package_name_includes_its_version() {
        assert_eq!(
            package_of("wasi:io/error@0.2.6").as_deref(),
            Some("wasi:io@0.2.6")
        );
        assert_eq!(package_of("a:b/c").as_deref(), Some("a:b"));
        assert_eq!(package_of("plain-name"), None);
    }

    #[test]
    fn packages_are_counted() {
        let names: Vec<String> = (0..=PACKAGES_MAX)
            .map(|number| format!("p:p{number}"))
            .collect();
        let all: Vec<(&str, &[&str])> = names
            .iter()
            .map(|name| (name.as_str(), &[] as &[&str]))
            .collect();
        assert!(check(&all).unwrap_err().contains("65 packages"));
        check(&all[1..]).unwrap();
    }
}
