//! The WIT packages in a core module, and their dependencies.
//!
//! `wit-component` (0.254) sorts them by their dependencies without checking for cycles: packages that depend on each other in a circle, which
//! no WIT text can declare and a damaged or hostile file can, overflow its stack. So they are checked first.

use std::collections::{BTreeMap, BTreeSet};

use wasmparser::BinaryReader;
use wit_component::DecodedWasm;
use wit_parser::Resolve;
use wit_parser::decoding;

/// The contract's and those of WASI are about ten.
const PACKAGES_MAX: usize = 64;
/// First byte of a section in the format before 2023, which the encoder still reads; others are a component.
const OLD_FORMAT: u8 = 3;

/// The packages of all sections of a module, which the encoder merges.
#[derive(Default)]
pub(super) struct WitPackages(BTreeMap<String, BTreeSet<String>>);

impl WitPackages {
    /// Adds the packages of a section. The encoder refuses sections that cannot be read.
    pub(super) fn add(&mut self, section: &[u8]) {
        let Some(resolve) = decoded(section) else { return };
        for (id, package) in resolve.packages.iter() {
            let needs = resolve.package_direct_deps(id).map(|id| resolve.packages[id].name.to_string());
            self.0.entry(package.name.to_string()).or_default().extend(needs);
        }
    }

    /// Refuses packages that cannot be sorted.
    pub(super) fn check(&self) -> Result<(), String> {
        if self.0.len() > PACKAGES_MAX {
            return Err(format!("its WIT has {} packages, at most {PACKAGES_MAX} are allowed", self.0.len()));
        }
        let mut left: BTreeSet<&String> = self.0.keys().collect();
        while let Some(first) = left.first().copied() {
            let before = left.clone();
            left.retain(|name| self.0[*name].iter().any(|other| before.contains(other)));
            if left == before {
                let name: String = first.escape_debug().take(128).collect();
                return Err(format!("packages of its WIT need each other in a circle, among them {name}"));
            }
        }
        Ok(())
    }
}

fn decoded(section: &[u8]) -> Option<Resolve> {
    if section.first() != Some(&OLD_FORMAT) {
        return decoding::decode_world(section).ok().map(|(resolve, _)| resolve);
    }
    let mut reader = BinaryReader::new(section, 0);
    reader.read_bytes(2).and_then(|_| reader.read_string()).ok()?;
    match wit_component::decode(&section[reader.current_position()..]).ok()? {
        DecodedWasm::WitPackage(resolve, _) | DecodedWasm::Component(resolve, _) => Some(resolve),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Surface, admission};

    fn check(needs: &[(&str, &[&str])]) -> Result<(), String> {
        let set = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        WitPackages(needs.iter().map(|(name, needs)| ((*name).to_owned(), set(needs))).collect()).check()
    }

    #[test]
    fn packages_that_need_each_other_in_a_circle_are_refused() {
        check(&[("a:a", &[]), ("b:b", &["a:a"]), ("c:c", &["a:a", "b:b"])]).unwrap();
        let error = check(&[("a:a", &[]), ("b:b", &["a:a", "d:d"]), ("d:d", &["b:b"])]).unwrap_err();
        assert!(error.contains("circle, among them b:b"), "{error}");
    }

    /// Modules that fuzzing found: the one overflowed the stack, the other made `wit-parser` panic.
    #[test]
    fn a_module_with_damaged_wit_is_refused_and_ends_nothing() {
        let circle = include_bytes!("../../../fuzz/seeds/admission/refused-circle-of-packages.wasm");
        let types = include_bytes!("../../../fuzz/seeds/admission/refused-types-that-panic-wit-parser.wasm");
        for (file, why) in [(circle, "circle"), (types, "damaged")] {
            let mut surface = Surface::default();
            let error = admission::admit(file, &mut surface).unwrap_err();
            assert!(error.code() == "not-a-driver", "{error:?}");
            assert!(error.to_string().contains(why), "{error}");
        }
    }

    #[test]
    fn packages_are_counted() {
        let names: Vec<String> = (0..=PACKAGES_MAX).map(|number| format!("p:p{number}")).collect();
        let all: Vec<(&str, &[&str])> = names.iter().map(|name| (name.as_str(), &[] as &[&str])).collect();
        assert!(check(&all).unwrap_err().contains("65 packages"));
        check(&all[1..]).unwrap();
    }
}
