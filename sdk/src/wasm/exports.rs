//! The driver's functions with the signatures of the bindings.

use std::marker::PhantomData;
use std::panic::PanicHookInfo;
use std::sync::Once;

use super::bindings::exports::nodedock::driver::{discovery, identity, preparation};
use super::bindings::nodedock::driver::{log, types};
use super::convert::{Convert, all};
use super::{configuration, health};
use crate::{Configuration, Driver, Health, Host};

use configuration::exports::nodedock::driver::configuration as configuration_exports;
use health::exports::nodedock::driver::health as health_exports;

/// Implements the traits of the bindings for a driver.
#[derive(Debug)]
pub struct Exported<D>(PhantomData<D>);

/// Begins a call: from here on the host's log gets a panic before it traps.
fn host() -> Host {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| std::panic::set_hook(Box::new(log_panic)));
    #[cfg(target_family = "wasm")]
    return Host::new(super::Imports);
    #[cfg(not(target_family = "wasm"))]
    return crate::testing::FakeHost::new().host();
}

fn log_panic(info: &PanicHookInfo<'_>) {
    let location = info.location().map(ToString::to_string).unwrap_or_default();
    let message = info.payload_as_str().unwrap_or("panic without a message");
    log::write(
        log::Level::Error,
        "driver panicked",
        &[("message".to_owned(), message.to_owned()), ("location".to_owned(), location)],
    );
}

impl<D: Driver> identity::Guest for Exported<D> {
    fn describe() -> identity::DriverInfo {
        host();
        D::describe().convert()
    }
}

impl<D: Driver> discovery::Guest for Exported<D> {
    fn discover(
        ctx: types::Context,
        trigger: discovery::Trigger,
    ) -> Result<types::Inventory, types::Problem> {
        let inventory = D::discover(&host(), &ctx.convert(), &trigger.convert());
        inventory.map(Convert::convert).map_err(Convert::convert)
    }
}

impl<D: Driver> preparation::Guest for Exported<D> {
    fn prepare(ctx: types::Context, claims: Vec<types::Claim>) -> Vec<types::PrepareOutcome> {
        let claims = all(claims);
        all(D::prepare_batch(&host(), &ctx.convert(), &claims))
    }

    fn unprepare(ctx: types::Context, claims: Vec<types::LiveClaim>) -> Vec<types::UnprepareOutcome> {
        let claims = all(claims);
        all(D::unprepare_batch(&host(), &ctx.convert(), &claims))
    }
}

impl<D: Configuration> configuration_exports::Guest for Exported<D> {
    fn config_schema() -> Option<String> {
        host();
        D::config_schema()
    }

    fn parameters_schema() -> Option<String> {
        host();
        D::parameters_schema()
    }

    fn validate_config(config: String) -> Result<(), types::Problem> {
        host();
        D::validate_config(&config).map_err(Convert::convert)
    }

    fn validate_parameters(parameters: String) -> Result<(), types::Problem> {
        host();
        D::validate_parameters(&parameters).map_err(Convert::convert)
    }
}

impl<D: Health> health_exports::Guest for Exported<D> {
    fn check(ctx: types::Context) -> Result<Vec<types::DeviceHealth>, types::Problem> {
        D::check(&host(), &ctx.convert()).map(all).map_err(Convert::convert)
    }
}
