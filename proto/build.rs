//! Compiles the `.proto` files with `protox`, so that no `protoc` has to be installed.

use std::error::Error;

const FILES: &[&str] = &["nodedock/node/v1/node.proto"];

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed=proto");
    let descriptors = protox::compile(FILES, ["proto"])?;
    tonic_prost_build::configure().btree_map(".").compile_fds(descriptors)?;
    Ok(())
}
