//! Makes a driver of a core module that a compiler for WASI 0.1 wrote, such as Go's.
//!
//! The host itself takes no module that imports WASI 0.1. The adapter that is put into the component turns these imports into WASI 0.2.

use std::path::Path;

use wasi_preview1_component_adapter_provider::{
    WASI_SNAPSHOT_PREVIEW1_ADAPTER_NAME, WASI_SNAPSHOT_PREVIEW1_REACTOR_ADAPTER,
};
use wit_component::{ComponentEncoder, StringEncoding, embed_component_metadata};
use wit_parser::{Resolve, WorldId};

use nodedock_base::printable::one_line;

/// The most bytes of a message.
const LINE_BYTES_MAX: usize = 512;

/// Why a module cannot be a driver.
#[derive(Debug, thiserror::Error)]
pub(super) enum WrapError {
    #[error("the WIT files in {directory}: {message}")]
    Wit { directory: String, message: String },
    #[error("the module does not implement the world {world}: {message}")]
    Module { world: String, message: String },
}

/// Returns the component of a core module that implements a world of the WIT package in a directory.
pub(super) fn wrap_module(
    mut module: Vec<u8>,
    wit: &Path,
    world: &str,
) -> Result<Vec<u8>, WrapError> {
    let mut resolve = Resolve::default();
    let id = select_world(&mut resolve, wit, world).map_err(|error| WrapError::Wit {
        directory: wit.display().to_string(),
        message: one_line(&format!("{error:#}"), LINE_BYTES_MAX),
    })?;
    encode(&mut module, &resolve, id).map_err(|error| WrapError::Module {
        world: world.to_owned(),
        message: one_line(&format!("{error:#}"), LINE_BYTES_MAX),
    })
}

fn select_world(resolve: &mut Resolve, wit: &Path, world: &str) -> anyhow::Result<WorldId> {
    let (package, _) = resolve.push_dir(wit)?;
    resolve.select_world(&[package], Some(world))
}

fn encode(module: &mut Vec<u8>, resolve: &Resolve, world: WorldId) -> anyhow::Result<Vec<u8>> {
    embed_component_metadata(module, resolve, world, StringEncoding::UTF8)?;
    ComponentEncoder::default()
        .validate(true)
        .module(module)?
        .adapter(
            WASI_SNAPSHOT_PREVIEW1_ADAPTER_NAME,
            WASI_SNAPSHOT_PREVIEW1_REACTOR_ADAPTER,
        )?
        .encode()
}
