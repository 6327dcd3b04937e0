//! The driver that `nodedock driver new --lang rust` writes builds with this SDK and passes its own tests, which run here.

#[path = "../../host/author/templates/driver/rust/lib.rs"]
mod driver;
