// Draws /docs: the OpenAPI document to click through.
if (window.SwaggerUIBundle) window.SwaggerUIBundle({ url: "/openapi.json", dom_id: "#swagger-ui", deepLinking: true });
