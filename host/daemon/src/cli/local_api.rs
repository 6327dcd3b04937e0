//! The commands' way to the local API: `nodedock claim`, `nodedock get slices`, `nodedock kubeconfig`.

use anyhow::{Context, Result};
use clap::Args;
use nodedock_kube::local_client::LocalClient;
use serde_json::Value;

use super::output::print_text;
use super::{CliError, Location};
use crate::app::local::KeptIdentity;
use crate::config::Paths;

/// Connects to the socket of the local API, beside the daemon's own.
pub(super) async fn connect(location: &Location) -> Result<LocalClient> {
    let socket = location.socket().with_file_name("api.sock");
    LocalClient::connect(&socket)
        .await
        .map_err(|source| CliError::NoLocalApi { socket, source: source.into() }.into())
}

#[derive(Args)]
pub(super) struct KubeconfigArgs {}

/// Prints the kubeconfig of the address on which the local API listens.
pub(super) fn kubeconfig(location: &Location, _: KubeconfigArgs) -> Result<()> {
    let path = Paths::below(&location.root).api_identity;
    let kept = KeptIdentity::read(&path)?;
    let Some((kept, address)) = kept.and_then(|kept| kept.address.map(|address| (kept, address))) else {
        let hint = "start the daemon with --local-api --local-api-listen 127.0.0.1:7443: kubectl and Go clients have no kubeconfig for a Unix socket";
        return Err(CliError::usage("the local API has no address", hint).into());
    };
    let text = nodedock_apiserver::kubeconfig(&format!("https://{address}"), &kept.identity());
    print_text(text.trim_end()).context("print the kubeconfig")
}

/// A text of an object; empty if it is not there.
pub(super) fn text<'a>(object: &'a Value, pointer: &str) -> &'a str {
    object.pointer(pointer).and_then(Value::as_str).unwrap_or_default()
}

/// The devices of an allocated claim, as `DRIVER/POOL/DEVICE`.
pub(super) fn devices(claim: &Value) -> Vec<String> {
    let results = claim.pointer("/status/allocation/devices/results").and_then(Value::as_array);
    let name = |of: &Value| ["/driver", "/pool", "/device"].map(|field| text(of, field).to_owned()).join("/");
    results.into_iter().flatten().map(name).collect()
}
