//! Makes a driver of a core module that a compiler for WASI 0.1 wrote, such as Go's, for tools of authors.
//!
//! The host itself takes no module that imports WASI 0.1. The adapter that is put into the component turns these imports into WASI 0.2.

use std::path::Path;

use wasi_preview1_component_adapter_provider::{
    WASI_SNAPSHOT_PREVIEW1_ADAPTER_NAME, WASI_SNAPSHOT_PREVIEW1_REACTOR_ADAPTER,
};
use wit_component::{ComponentEncoder, StringEncoding, embed_component_metadata};
use wit_parser::Resolve;

use crate::load::admission::bounded_line;

/// Why a module cannot be a driver.
#[derive(Debug, thiserror::Error)]
pub enum WrapError {
    #[error("the WIT files in {directory}: {message}")]
    Wit { directory: String, message: String },
    #[error("the module does not implement the world {world}: {message}")]
    Module { world: String, message: String },
}

/// Returns the component of a core module that implements a world of the WIT package in a directory.
pub fn wrap_module(mut module: Vec<u8>, wit: &Path, world: &str) -> Result<Vec<u8>, WrapError> {
    let bad_wit = |error: &dyn std::fmt::Display| WrapError::Wit {
        directory: wit.display().to_string(),
        message: bounded_line(&format!("{error:#}")),
    };
    let mut resolve = Resolve::default();
    let (package, _) = resolve.push_dir(wit).map_err(|error| bad_wit(&error))?;
    let id = resolve
        .select_world(&[package], Some(world))
        .map_err(|error| bad_wit(&error))?;
    let bad_module = |error: &dyn std::fmt::Display| WrapError::Module {
        world: world.to_owned(),
        message: bounded_line(&format!("{error:#}")),
    };
    embed_component_metadata(&mut module, &resolve, id, StringEncoding::UTF8)
        .map_err(|error| bad_module(&error))?;
    let encode = || {
        ComponentEncoder::default()
            .validate(true)
            .module(&module)?
            .adapter(
                WASI_SNAPSHOT_PREVIEW1_ADAPTER_NAME,
                WASI_SNAPSHOT_PREVIEW1_REACTOR_ADAPTER,
            )?
            .encode()
    };
    encode().map_err(|error| bad_module(&error))
}
