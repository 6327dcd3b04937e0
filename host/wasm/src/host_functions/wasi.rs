//! WASI 0.2 for drivers of other toolchains: interface by interface, with nothing behind it. No arguments, no environment, no
//! directories, no network; clocks and random numbers; standard output and error go to the driver's log.

use wasmtime::component::{HasData, Linker, Resource, ResourceTable, ResourceType, Val};
use wasmtime_wasi::cli::{WasiCli, WasiCliView as _};
use wasmtime_wasi::clocks::{WasiClocks, WasiClocksView as _};
use wasmtime_wasi::p2::bindings::{cli, clocks, random};
use wasmtime_wasi::random::WasiRandom;
use wasmtime_wasi::{WasiCtxView, WasiView};

use crate::host_functions::state::CallState;

/// The interfaces that are linked, without `wasi:` and version.
pub(crate) const LINKED: &[&str] = &[
    "io/error",
    "io/poll",
    "io/streams",
    "cli/environment",
    "cli/exit",
    "cli/stdin",
    "cli/stdout",
    "cli/stderr",
    "cli/terminal-input",
    "cli/terminal-output",
    "cli/terminal-stdin",
    "cli/terminal-stdout",
    "cli/terminal-stderr",
    "clocks/monotonic-clock",
    "clocks/wall-clock",
    "random/random",
    "random/insecure",
    "random/insecure-seed",
    "filesystem/types",
    "filesystem/preopens",
];

struct HasIo;

impl HasData for HasIo {
    type Data<'a> = &'a mut ResourceTable;
}

pub(crate) fn add_to_linker(linker: &mut Linker<CallState>) -> wasmtime::Result<()> {
    use wasmtime_wasi::p2::bindings::io;
    io::error::add_to_linker::<CallState, HasIo>(linker, |state| &mut state.table)?;
    io::poll::add_to_linker::<CallState, HasIo>(linker, |state| &mut state.table)?;
    io::streams::add_to_linker::<CallState, HasIo>(linker, |state| &mut state.table)?;
    cli::environment::add_to_linker::<CallState, WasiCli>(linker, CallState::cli)?;
    cli::exit::add_to_linker::<CallState, WasiCli>(linker, CallState::cli)?;
    cli::stdin::add_to_linker::<CallState, WasiCli>(linker, CallState::cli)?;
    cli::stdout::add_to_linker::<CallState, WasiCli>(linker, CallState::cli)?;
    cli::stderr::add_to_linker::<CallState, WasiCli>(linker, CallState::cli)?;
    cli::terminal_input::add_to_linker::<CallState, WasiCli>(linker, CallState::cli)?;
    cli::terminal_output::add_to_linker::<CallState, WasiCli>(linker, CallState::cli)?;
    cli::terminal_stdin::add_to_linker::<CallState, WasiCli>(linker, CallState::cli)?;
    cli::terminal_stdout::add_to_linker::<CallState, WasiCli>(linker, CallState::cli)?;
    cli::terminal_stderr::add_to_linker::<CallState, WasiCli>(linker, CallState::cli)?;
    clocks::wall_clock::add_to_linker::<CallState, WasiClocks>(linker, CallState::clocks)?;
    clocks::monotonic_clock::add_to_linker::<CallState, WasiClocks>(linker, CallState::clocks)?;
    random::random::add_to_linker::<CallState, WasiRandom>(linker, |state| {
        state.ctx().ctx.random()
    })?;
    random::insecure::add_to_linker::<CallState, WasiRandom>(linker, |state| {
        state.ctx().ctx.random()
    })?;
    random::insecure_seed::add_to_linker::<CallState, WasiRandom>(linker, |state| {
        state.ctx().ctx.random()
    })?;
    add_empty_filesystem(linker)
}

/// The C library's start code looks for directories here. There are none, so no descriptor can ever exist, and every function that takes
/// one is out of reach: wasmtime-wasi's code for files, the part of it with the most advisories, is not linked.
fn add_empty_filesystem(linker: &mut Linker<CallState>) -> wasmtime::Result<()> {
    /// Never made.
    struct Descriptor;
    /// Never made.
    struct DirectoryEntryStream;

    let mut types = linker.instance("wasi:filesystem/types@0.2.6")?;
    types.resource("descriptor", ResourceType::host::<Descriptor>(), |_, _| {
        Ok(())
    })?;
    types.resource(
        "directory-entry-stream",
        ResourceType::host::<DirectoryEntryStream>(),
        |_, _| Ok(()),
    )?;
    for name in DESCRIPTOR_METHODS {
        types.func_new(&format!("[method]descriptor.{name}"), |_, _, _, _| {
            Err(wasmtime::format_err!("there are no files in the sandbox"))
        })?;
    }
    types.func_new(
        "[method]directory-entry-stream.read-directory-entry",
        |_, _, _, _| Err(wasmtime::format_err!("there are no files in the sandbox")),
    )?;
    types.func_new("filesystem-error-code", |_, _, _, results| {
        results[0] = Val::Option(None);
        Ok(())
    })?;
    let mut preopens = linker.instance("wasi:filesystem/preopens@0.2.6")?;
    preopens.func_wrap("get-directories", |_, (): ()| {
        Ok((Vec::<(Resource<Descriptor>, String)>::new(),))
    })?;
    Ok(())
}

const DESCRIPTOR_METHODS: &[&str] = &[
    "advise",
    "append-via-stream",
    "create-directory-at",
    "get-flags",
    "get-type",
    "is-same-object",
    "link-at",
    "metadata-hash",
    "metadata-hash-at",
    "open-at",
    "read",
    "read-directory",
    "read-via-stream",
    "readlink-at",
    "remove-directory-at",
    "rename-at",
    "set-size",
    "set-times",
    "set-times-at",
    "stat",
    "stat-at",
    "symlink-at",
    "sync",
    "sync-data",
    "unlink-file-at",
    "write",
    "write-via-stream",
];

impl WasiView for CallState {
    fn ctx(&mut self) -> WasiCtxView<'_> {
        let (wasi, table) = self.wasi_parts();
        WasiCtxView { ctx: wasi, table }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// The contract names the same interfaces, in lines such as "- `wasi:io` `error`, `poll`".
    #[test]
    fn contract_lists_the_linked_interfaces() {
        let contract = include_str!("../../../../wit/driver.wit");
        let (_, list) = contract
            .split_once("Of WASI 0.2 the host links")
            .expect("the contract has the list");
        let (list, _) = list
            .split_once("A driver that imports anything else")
            .expect("the list has an end");
        let mut listed = BTreeSet::new();
        let mut package = String::new();
        for word in list.split('`').skip(1).step_by(2) {
            match word.strip_prefix("wasi:") {
                Some(name) => name.clone_into(&mut package),
                None => drop(listed.insert(format!("{package}/{word}"))),
            }
        }
        assert_eq!(listed, LINKED.iter().map(ToString::to_string).collect());
    }
}
