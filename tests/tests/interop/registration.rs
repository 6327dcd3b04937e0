//! A registration socket made by a driver in Rust, called as the kubelet calls it: with grpc-go, by the bare path.

use std::sync::{Arc, Mutex};

use nodedock_proto::kubelet::registration::registration_server::{Registration, RegistrationServer};
use nodedock_proto::kubelet::registration::{
    InfoRequest, PluginInfo, RegistrationStatus, RegistrationStatusResponse,
};
use nodedock_proto::unix;
use nodedock_tests::{Root, machine};
use serde_json::{Value, json};
use tokio::net::UnixListener;
use tonic::{Request, Response, Status};

use crate::{lines, programs};

/// A driver that records the notifications of its registration.
#[derive(Clone, Default)]
struct Plugin(Arc<Mutex<Vec<RegistrationStatus>>>);

#[tonic::async_trait]
impl Registration for Plugin {
    async fn get_info(&self, _: Request<InfoRequest>) -> Result<Response<PluginInfo>, Status> {
        Ok(Response::new(PluginInfo {
            r#type: "DRAPlugin".to_owned(),
            name: "gpu.example.com".to_owned(),
            endpoint: "/somewhere/dra.sock".to_owned(),
            supported_versions: vec!["v1.DRAPlugin".to_owned()],
        }))
    }

    async fn notify_registration_status(
        &self,
        request: Request<RegistrationStatus>,
    ) -> Result<Response<RegistrationStatusResponse>, Status> {
        self.0.lock().unwrap().push(request.into_inner());
        Ok(Response::new(RegistrationStatusResponse {}))
    }
}

#[tokio::test]
async fn the_kubelets_way_to_dial_reaches_a_driver_in_rust() {
    let agent = match programs::go("agent") {
        Ok(agent) => agent,
        Err(why) => return machine::skip("a registration socket called by a program in Go", &why),
    };
    let root = Root::new();
    let socket = root.path().join("gpu.example.com-reg.sock");
    let plugin = Plugin::default();
    let server = tonic::transport::Server::builder().add_service(RegistrationServer::new(plugin.clone()));
    let listener = UnixListener::bind(&socket).expect("a new socket");
    let server = tokio::spawn(server.serve_with_incoming(unix::incoming(listener)));

    let said = lines(&agent, &["register", socket.to_str().expect("UTF-8")]).await;
    let info: Value = serde_json::from_str(&said.concat()).expect("JSON");
    let (name, endpoint) = ("gpu.example.com", "/somewhere/dra.sock");
    let versions = ["v1.DRAPlugin"];
    assert_eq!(info, json!({"type": "DRAPlugin", "name": name, "endpoint": endpoint, "versions": versions}));
    let registered = RegistrationStatus { plugin_registered: true, error: String::new() };
    assert_eq!(*plugin.0.lock().unwrap(), [registered]);
    server.abort();
}
