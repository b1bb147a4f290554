"""Storage: five small ports and the engines that serve them."""
