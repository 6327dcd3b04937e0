//! Small drivers in WebAssembly text, with the contract inside as wit-bindgen puts it there.
//!
//! Answers are laid out by hand as the canonical ABI has them; zeroed memory is an empty inventory, an empty list of outcomes,
//! and a prepared claim without edits.

use wit_component::{ComponentEncoder, StringEncoding, embed_component_metadata};
use wit_parser::{PackageId, Resolve, SourceMap};

/// Bodies of the functions, and the other parts of a driver.
#[derive(Clone)]
pub(crate) struct Guest {
    pub(crate) world: &'static str,
    pub(crate) imports: String,
    pub(crate) extra: String,
    pub(crate) describe: String,
    pub(crate) discover: String,
    pub(crate) prepare: String,
    pub(crate) unprepare: String,
    pub(crate) realloc: String,
    pub(crate) pages: u32,
    /// Capabilities: a list of one glob each, by their place in the record.
    pub(crate) env: Option<&'static str>,
    pub(crate) sysfs_read: Option<&'static str>,
    /// A glob and a pattern.
    pub(crate) sysfs_write: Option<(&'static str, &'static str)>,
    pub(crate) version: &'static str,
    /// A WIT package of its own, whose world `hostile` is taken instead.
    pub(crate) wit: Option<&'static str>,
}

impl Default for Guest {
    fn default() -> Self {
        Self {
            world: "driver",
            imports: String::new(),
            extra: String::new(),
            describe: "i32.const 1024".to_owned(),
            discover: "i32.const 8192".to_owned(),
            prepare: "i32.const 8192".to_owned(),
            unprepare: "i32.const 8192".to_owned(),
            realloc: REALLOC.to_owned(),
            pages: 1,
            env: None,
            sysfs_read: None,
            sysfs_write: None,
            version: "0.2.0",
            wit: None,
        }
    }
}

/// Worlds of a driver with one facet: a tool embeds several worlds instead.
const WORLDS: &str = "package nodedock:worlds;
    world measurable { include nodedock:driver/driver@VERSION; include nodedock:driver/telemetry-facet@VERSION; }
    world selective { include nodedock:driver/driver@VERSION; include nodedock:driver/left-out-facet@VERSION; }
    world observable { include nodedock:driver/driver@VERSION; include nodedock:driver/health-facet@VERSION; }
    world schedulable { include nodedock:driver/driver@VERSION; include nodedock:driver/scheduling-facet@VERSION; }
    world configurable { include nodedock:driver/driver@VERSION; include nodedock:driver/configuration-facet@VERSION; }";

/// The contract as if it had this version.
pub(crate) fn push_contract(resolve: &mut Resolve, version: &str) -> PackageId {
    let files = [
        ("claims", include_str!("../../../../wit/claims.wit")),
        ("common", include_str!("../../../../wit/common.wit")),
        (
            "container-edits",
            include_str!("../../../../wit/container-edits.wit"),
        ),
        ("driver", include_str!("../../../../wit/driver.wit")),
        ("facets", include_str!("../../../../wit/facets.wit")),
        ("host", include_str!("../../../../wit/host.wit")),
        ("inventory", include_str!("../../../../wit/inventory.wit")),
    ];
    let mut sources = SourceMap::new();
    for (name, text) in files {
        sources.push_str(
            &format!("{name}.wit"),
            text.replace("@0.2.0", &format!("@{version}")),
        );
    }
    resolve
        .push_group(sources.parse().map_err(|(_, error)| error).unwrap())
        .unwrap()
}

pub(crate) const NAME: &str = "tiny.example.com";

/// Gives each claim back as prepared, if there is one: its outcome has the UID that was asked for, and the environment of
/// the 64 bytes at 12288 (empty unless `env_edit` is there).
pub(crate) const PREPARE_ONE: &str = "
    (i32.store (i32.const 8192) (i32.const 8448))
    (i32.store (i32.const 8196) (i32.const 1))
    (i64.store (i32.const 8448) (i64.load offset=16 (local.get 11)))
    (i64.store (i32.const 8468) (i64.load (i32.const 12288)))
    i32.const 8192";

/// One environment variable, as the driver's own edit.
pub(crate) fn env_edit(name: &str, value: &str) -> String {
    let list = words(&[12304, 1]);
    let label = words(&[12352, len(name), 12416, len(value)]);
    format!(
        "(data (i32.const 12288) \"{list}\") (data (i32.const 12304) \"{label}\")
         (data (i32.const 12352) \"{name}\") (data (i32.const 12416) \"{value}\")"
    )
}

/// The import of `sysfs-write`.
pub(crate) const WRITE_IMPORT: &str = "(import \"nodedock:driver/sysfs-write@0.2.0\" \"write\" (func $write (param i32 i32 i32 i32 i32)))";

/// A path and a value, for `write_call`.
pub(crate) fn write_data(path: &str, value: &str) -> String {
    let value: String = value.bytes().map(|byte| format!("\\{byte:02x}")).collect();
    format!("(data (i32.const 12800) \"{path}\") (data (i32.const 12928) \"{value}\")")
}

/// Writes that value to that path.
pub(crate) fn write_call(path: &str, value: &str) -> String {
    let (path, value) = (len(path), len(value));
    format!(
        "(call $write (i32.const 12800) (i32.const {path}) (i32.const 12928) (i32.const {value}) (i32.const 13056))"
    )
}

fn len(text: &str) -> u32 {
    u32::try_from(text.len()).unwrap()
}

fn words(words: &[u32]) -> String {
    words
        .iter()
        .flat_map(|word| word.to_le_bytes())
        .map(|byte| format!("\\{byte:02x}"))
        .collect()
}

impl Guest {
    fn text(&self) -> String {
        let mut info = [0u32; 36];
        info[..4].copy_from_slice(&[2048, len(NAME), 2112, 5]);
        let mut data =
            format!("(data (i32.const 2048) \"{NAME}\") (data (i32.const 2112) \"1.2.3\")");
        for (place, glob, at) in [(6, self.sysfs_read, 2176), (20, self.env, 2304)] {
            if let Some(glob) = glob {
                info[place..place + 2].copy_from_slice(&[at, 1]);
                let list = words(&[at + 8, len(glob)]);
                data += &format!(
                    "(data (i32.const {at}) \"{list}\") (data (i32.const {}) \"{glob}\")",
                    at + 8
                );
            }
        }
        if let Some((glob, pattern)) = self.sysfs_write {
            info[8..10].copy_from_slice(&[2560, 1]);
            let grant = words(&[2576, len(glob), 2704, len(pattern)]);
            data += &format!(
                "(data (i32.const 2560) \"{grant}\") (data (i32.const 2576) \"{glob}\") (data (i32.const 2704) \"{pattern}\")"
            );
        }
        let context = "(param i32 i32 i32 i32 i32 i32 i64 i32 i32 i32 i32";
        let Self {
            imports,
            extra,
            describe,
            discover,
            prepare,
            unprepare,
            realloc,
            pages,
            version,
            ..
        } = self;
        let package = format!("@{version}");
        format!(
            "(module {imports}
               (memory (export \"memory\") {pages})
               (data (i32.const 1024) \"{}\") {data} {extra}
               (func (export \"cabi_realloc\") (param i32 i32 i32 i32) (result i32) {realloc})
               (global $top (mut i32) (i32.const 16384))
               (func (export \"nodedock:driver/identity{package}#describe\") (result i32) {describe})
               (func (export \"nodedock:driver/discovery{package}#discover\") {context} i32 i32 i32) (result i32) {discover})
               (func (export \"nodedock:driver/preparation{package}#prepare\") {context} i32 i32) (result i32) {prepare})
               (func (export \"nodedock:driver/preparation{package}#unprepare\") {context} i32 i32) (result i32) {unprepare}))",
            words(&info)
        )
    }

    /// A core module with the contract inside.
    pub(crate) fn module(&self) -> Vec<u8> {
        let mut module = wat::parse_str(self.text()).unwrap();
        let mut resolve = Resolve::default();
        let mut package = push_contract(&mut resolve, self.version);
        let worlds = WORLDS.replace("@VERSION", &format!("@{}", self.version));
        if matches!(
            self.world,
            "observable" | "measurable" | "configurable" | "schedulable" | "selective"
        ) {
            package = resolve.push_str("worlds.wit", &worlds).unwrap();
        }
        if let Some(wit) = self.wit {
            package = resolve.push_str("hostile.wit", wit).unwrap();
        }
        let world = if self.wit.is_some() {
            "hostile"
        } else {
            self.world
        };
        let world = resolve.select_world(&[package], Some(world)).unwrap();
        embed_component_metadata(&mut module, &resolve, world, StringEncoding::UTF8).unwrap();
        module
    }

    /// The same as a component.
    pub(crate) fn component(&self) -> Vec<u8> {
        ComponentEncoder::default()
            .module(&self.module())
            .unwrap()
            .encode()
            .unwrap()
    }
}

/// A bump allocator; what does not fit grows the memory.
const REALLOC: &str = "(local $at i32)
    (local.set $at (i32.and (i32.add (global.get $top) (i32.const 7)) (i32.const -8)))
    (global.set $top (i32.add (local.get $at) (local.get 3)))
    (local.get $at)";
