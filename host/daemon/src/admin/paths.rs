//! Whether each driver's path is open: from its socket in the kubelet's folder, through the service behind it, and back.
//!
//! The question is a prepare of no claims, which reaches no driver: one that is bad must not make the daemon look dead.

use std::io::ErrorKind;
use std::path::Path;

use futures::StreamExt;
use nodedock_proto::kubelet::dra::v1::NodePrepareResourcesRequest;
use nodedock_proto::kubelet::dra::v1::dra_plugin_client::DraPluginClient;
use tokio::time::timeout;

use nodedock_base::error::chain;
use nodedock_base::socket::{ConnectError, connect};
use nodedock_kube::bridge::{Bridge, Registration};
use nodedock_model::limit;

/// What is wrong with the drivers' paths, a line each. A socket that is not open is not looked at: it is made anew by the bridge, and a
/// restart of the daemon would do no more.
pub(super) async fn wrong(bridge: &Bridge) -> Vec<String> {
    let open = bridge.drivers().into_iter().filter(|status| status.is_open);
    let sockets = open.filter_map(|status| Some((status.driver, status.sockets?.service)));
    let looks = futures::stream::iter(sockets).map(|(driver, socket)| async move {
        match timeout(limit::LIVE_DEADLINE, ask(&socket)).await {
            Ok(Ok(())) => None,
            Ok(Err(why)) => Some(format!("the path of driver {driver} is broken: {why}")),
            Err(_) => {
                Some(format!("the path of driver {driver} did not answer within {:?}", limit::LIVE_DEADLINE))
            }
        }
    });
    looks.buffer_unordered(limit::LIVE_PATHS_AT_ONCE).filter_map(std::future::ready).collect().await
}

async fn ask(socket: &Path) -> Result<(), String> {
    let channel = match connect(socket).await {
        // It was removed just now, and the bridge makes it again.
        Err(ConnectError::Connect { source, .. }) if source.kind() == ErrorKind::NotFound => return Ok(()),
        channel => channel.map_err(|error| chain(&error))?,
    };
    let mut client = DraPluginClient::new(channel);
    let asked = client.node_prepare_resources(NodePrepareResourcesRequest::default()).await;
    asked.map(drop).map_err(|status| chain(&status))
}

/// Drivers of which a kubelet has not said what it makes of them, a line each. One that it refused, or for which no socket has a name
/// that fits, is a condition and is not waited for, as a driver that failed to load.
pub(super) fn awaited(bridge: &Bridge) -> Vec<String> {
    let statuses = bridge.drivers().into_iter().filter(|status| status.problem.is_none());
    let why = |registration: &Registration| match registration {
        Registration::Offered => Some("it did not ask yet"),
        Registration::Asked => Some("it asked, and did not say yet"),
        Registration::Registered | Registration::Refused(_) => None,
    };
    let unknown = statuses.filter_map(|status| Some((status.driver, why(&status.registration)?)));
    unknown
        .map(|(driver, why)| format!("driver {driver} is not registered with the kubelet: {why}"))
        .collect()
}
