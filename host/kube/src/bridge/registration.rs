//! `pluginregistration.Registration`: who a driver is, and what a kubelet made of it.
//!
//! A kubelet gives a second for the first and five for the other: nothing here waits for anything.

use std::sync::Arc;

use nodedock_proto::kubelet::registration as wire;
use tonic::{Request, Response, Status};
use wire::registration_server::{Registration, RegistrationServer};

use super::convert;
use super::offer::Offer;
use nodedock_base::grpc::begin;
use nodedock_model::limit::REGISTER_BYTES_MAX;

pub(super) fn service(offer: Arc<Offer>) -> RegistrationServer<impl Registration> {
    RegistrationServer::new(Face(offer)).max_decoding_message_size(REGISTER_BYTES_MAX)
}

struct Face(Arc<Offer>);

#[tonic::async_trait]
impl Registration for Face {
    async fn get_info(
        &self,
        request: Request<wire::InfoRequest>,
    ) -> Result<Response<wire::PluginInfo>, Status> {
        begin("Registration.GetInfo", &request);
        self.0.asked();
        Ok(Response::new(convert::plugin_info(&self.0.driver, &self.0.endpoint)))
    }

    async fn notify_registration_status(
        &self,
        request: Request<wire::RegistrationStatus>,
    ) -> Result<Response<wire::RegistrationStatusResponse>, Status> {
        begin("Registration.NotifyRegistrationStatus", &request);
        let wire::RegistrationStatus { plugin_registered, error } = request.into_inner();
        if plugin_registered {
            self.0.registered();
            return Ok(Response::new(wire::RegistrationStatusResponse {}));
        }
        let why = self.0.refused(&error);
        // As the Go helper does it.
        Err(Status::failed_precondition(format!("driver {} was not registered: {why}", self.0.driver)))
    }
}
